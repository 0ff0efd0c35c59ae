"""Ranks that differ by role, by design: a teacher and its students, a head for each client, folds by rank, candidates of evolution strategies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from builder import event, findings, recording, row, run
from replica_runs import NAMES, by_rank, setup, two_ranks, wrap_event
from test_dat import one_pass

from harness.checks.base import Check
from harness.checks.evl import one_shard
from harness.checks.evl.measured import Measured
from harness.checks.evl.reports import Report
from harness.checks.registry import all_checks
from harness.model import Severity
from harness.probe import protocol
from harness.record import Event, Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}
APART = by_rank(grad=(5, 55), param=(6, 66))
WRONG = {"grad": (0,), "param": (0,)}


def roles(*, lines: tuple[int, int] = (22, 22), widths: tuple[int, int] = (4, 4), extra: int = 0, ddp: bool = False) -> Run:
    """Rank 0 takes 6 steps before the first of 5 calls, rank 1 a step for each call; rank 1 may make a call that rank 0 does not."""
    made = []
    for rank in (0, 1):
        at = [6] * 5 if rank == 0 else list(range(5))
        params = event("params", line=lines[rank], opt=0, names=NAMES, numels=[4] * 4, shapes=[[widths[rank]]] * 4, ddp=[-1] * 4)
        calls = [coll(s, 60) for s in at] + [coll(5, 70) for _ in range(extra * rank)]
        events = [event("pg", done=True, rank=rank, world_size=2), *([wrap_event()] if ddp else []), params, *calls]
        made.append(recording(events, [row(s, grad=rank + 1, num_coll=at.count(s)) for s in range(6)], rank=rank, world_size=2))
    return run(made, exits=(0, 0))


def coll(s: int, line: int) -> Event:
    return event("coll", line=line, s=s, op="broadcast", numel=8, dtype="float32", n=0, grad=False, world=True, names=[])


@pytest.mark.parametrize(("made", "fires"), [
    (roles(), True),
    (roles(lines=(22, 33)), False),  # a teacher and a student
    (roles(widths=(4, 8)), False),  # made by one helper
    (roles(widths=(4, 8), ddp=True), True),
    (roles(lines=(22, 33), extra=1), True),  # a call that has no partner at all
])  # fmt: skip
def test_steps_of_ranks_in_other_roles_have_no_common_number(made: Run, fires: bool) -> None:
    assert bool(findings(CHECKS["SYN122"], made)) == fires


def head(*, hyper: tuple[int, int] = (1, 2), grad: tuple[int, int] = (5, 55), start: tuple[int, int] = (1, 9), ddp: int = -1,
         widths: tuple[int, int] = (4, 4), sampler: bool = False) -> Run:  # fmt: skip
    """DDP wraps a body; what this optimizer steps lies beside it."""
    def begun(rank: int) -> list[Event]:
        told = {"opt": 0, "kind": "SGD", "names": NAMES, "numels": [4, 16, 4, 16], "ddp": [ddp] * 4, "owned": [True] * 4, "requires_grad": [True] * 4,
                "shapes": [[4], [4, 4], [4], [widths[rank], 4]]}  # fmt: skip
        wraps = [event("pg", done=True, rank=rank, world_size=2), wrap_event(names=["body.weight"])]
        loop = one_pass(0, [rank], distributed={"num_replicas": 2, "rank": rank}) if sampler else []
        return [*wraps, event("params", line=22, **told), event("initial", opt=0, each=[start[rank], 2, 3, 4]), *loop]

    return two_ranks(setup_of=begun, each=by_rank(hyper=hyper, grad=grad, param=(6, 66)), wrong=WRONG)


@pytest.mark.parametrize(("fields", "rates", "outside"), [
    ({}, False, Severity.ADVICE),  # a head for each client
    ({"hyper": (1, 1)}, False, Severity.ERROR),  # forgotten: all alike but the gradients
    ({"start": (1, 1)}, False, Severity.ERROR),
    ({"grad": (5, 5)}, True, Severity.ADVICE),  # averaged by hand: the rates part it
    ({"ddp": 0}, True, None),
    ({"hyper": (1, 1), "widths": (4, 6)}, False, None),  # a vocabulary and a head for each language
    ({"hyper": (1, 1), "widths": (4, 6), "sampler": True}, False, Severity.ERROR),
])  # fmt: skip
def test_a_head_that_each_client_keeps(fields: Mapping[str, Any], rates: bool, outside: Severity | None) -> None:
    made = head(**fields)
    assert bool(findings(CHECKS["OPT103"], made)) == rates
    if fields != {"grad": (5, 5)}:
        assert [f.severity for f in findings(CHECKS["SYN114"], made)] == ([outside] if outside else [])


def held_out(train: tuple[list[int], list[int]], held: tuple[list[int], list[int]], *, rows: bool = True, **fields: Any) -> Run:
    """Each rank trains alone on some samples and measures on others."""
    def passes(rank: int) -> list[Event]:
        own = {} if rows else {"rows": [2000 * rank + i for i in range(len(train[rank]))]}
        off = {"backwards": 0, "steps": 0, "grad": False, "training": False}
        return [*one_pass(0, train[rank], sampler="RandomSampler", **own, **fields), *one_pass(1, held[rank], line=50, sampler="SequentialSampler", **off)]

    each = lambda rank, s: {"grad": 5 + s + 90 * rank, "param": 6 + s + 90 * rank, "hyper": 10}  # noqa: E731
    return two_ranks(ddp=False, each=each, extra=passes)


FIRST, SECOND, THIRD = list(range(8)), list(range(8, 16)), list(range(16, 24))


@pytest.mark.parametrize(("made", "severity"), [
    (held_out((SECOND, FIRST), (FIRST, SECOND)), Severity.ADVICE),  # two folds
    (held_out((SECOND + THIRD, FIRST + THIRD), (FIRST, SECOND)), Severity.ADVICE),
    (held_out((SECOND, FIRST), (FIRST, SECOND), rows=False), Severity.ADVICE),  # augmented samples: their places tell
    (held_out((FIRST, SECOND), (THIRD, THIRD)), Severity.ERROR),
    (held_out((FIRST, SECOND), (THIRD[:4], THIRD[4:])), Severity.ERROR),  # shares of both
    (held_out((FIRST, SECOND), (FIRST, SECOND)), Severity.ERROR),  # measured on what it is trained on
    (held_out((FIRST + SECOND[:4], SECOND + THIRD), (SECOND[4:] + THIRD[:4], THIRD[:4] + FIRST[:4])), Severity.ERROR),  # drawn by chance: they overlap
    (held_out((SECOND, FIRST), (FIRST, SECOND), distributed={"num_replicas": 2, "rank": 0}), Severity.ERROR),
])  # fmt: skip
def test_folds_by_rank_that_loaders_show(made: Run, severity: Severity) -> None:
    assert [f.severity for f in findings(CHECKS["SYN126"], made)] == [severity]


@pytest.mark.parametrize(("first", "last", "backward", "param", "fires"), [
    ((5, 6), (7, 8), 0, (3, 3), False),  # candidates
    ((5, 6), (7, 8), 1, (3, 3), True),  # averages of models that started apart
    ((5, 6), (5, 6), 0, (3, 3), True),  # what nobody writes
    ((5, 6), (7, 8), 0, (3, 4), True),  # the ranks' centres part
])  # fmt: skip
def test_candidates_that_ranks_try(first: tuple[int, int], last: tuple[int, int], backward: int, param: tuple[int, int], fires: bool) -> None:
    def extra(rank: int) -> list[Event]:
        return [event("others", models=[{"module": "Net", "num": 2, "first": first[rank], "digest": last[rank], "called": True, "grad": False}])]

    made = two_ranks(ddp=False, setup_of=lambda r: setup(r, ddp=False), extra=extra, each=lambda r, s: {"num_backward": backward, "param": param[r]})
    assert bool(findings(CHECKS["SYN115"], made)) == fires


@pytest.mark.parametrize(("text", "listed"), [
    ("#0 acc 0.912 #1 acc 0.877", True),
    ("acc 91.20 87.70", True),
    ("acc 0.912 loss 0.301", False),
    ("acc 0.912", False),
])  # fmt: skip
def test_a_line_that_lists_what_each_rank_measured(text: str, listed: bool) -> None:
    group = [Measured(r, event("measured", of="item", mean=m, weighted=m, sum=m, num=1, rows=1)) for r, m in enumerate((0.912, 0.877))]
    assert one_shard._lists_all(Report(0, None, 0, 0, 0, text, "print"), group) == listed


def test_a_line_that_names_a_client_says_whose_it_is() -> None:
    assert Report(0, None, 0, 0, 0, "client 0: acc 0.91", "print").tagged and not Report(0, None, 0, 0, 0, "clients 3, acc 0.91", "print").tagged


def alone_first(*, grad: tuple[int, int], measured: bool = False) -> Run:
    """Six steps by which the ranks share nothing, or all, over one loader that is the same on all; then DDP wraps, and a sampler deals out."""
    made = []
    for rank in (0, 1):
        whole = {"line": 30, "sampler": "RandomSampler", "dataset_len": 8}
        passes = one_pass(0, list(range(8)), steps=6, backwards=6, **whole)
        if measured:
            passes = one_pass(0, list(range(8)), steps=0, backwards=0, grad=False, training=False, s=6, **whole)
        params = [event("params", line=22, s=6 * opt, opt=opt, names=NAMES, numels=[4] * 4, ddp=[opt - 1] * 4) for opt in (0, 1)]
        wraps = [event("wrapping", s=6, line=20, each=[1]), event("wrap", s=6, index=0, group_size=2, names=NAMES, each=[1])]
        rows = [row(s, opt=0, grad=grad[rank], param=6 + grad[rank], num_backward=1) for s in range(6)]
        rows += [row(s, opt=1, grad=5, param=6, flags=protocol.FLAG_DDP, num_reduce=1) for s in range(6, 12)]
        made.append(recording([event("pg", done=True, rank=rank, world_size=2), *params[:1], *passes, *wraps, *params[1:]], rows, rank=rank, world_size=2))
    return run(made, exits=(0, 0))


@pytest.mark.parametrize(("grad", "fires"), [((5, 55), False), ((5, 5), True)])
def test_data_of_steps_that_ranks_take_alone_is_not_shared_out(grad: tuple[int, int], fires: bool) -> None:
    assert bool(findings(CHECKS["DAT102"], alone_first(grad=grad))) == fires
    assert bool(findings(CHECKS["EVL104"], alone_first(grad=grad, measured=True))) == fires


def two_clips(norms: Mapping[str, tuple[float, float]], *, opts: tuple[int, int] = (0, 1), limit: float = 0.5) -> Run:
    """Lines 60 and 61 clip, each for an optimizer of its own, before both step; gradients of the second are each rank's own."""
    made = []
    for rank in (0, 1):
        first, second = norms["first"][rank], norms["second"][rank]
        events = [event("pg", done=True, rank=rank, world_size=2), wrap_event()]
        events += [event("params", line=22, opt=opt, names=NAMES, numels=[4] * 4, ddp=[-opt] * 4) for opt in (0, 1)]
        rows = []
        for s in range(0, 12, 2):
            known = opts if s else (-1, -1)  # before its first step an optimizer is not known
            events += [event("clip", line=60, s=s, norm=first, max_norm=limit, opt=known[0]), event("clip", line=61, s=s, norm=second, max_norm=limit, opt=known[1])]
            flags = {"flags": protocol.FLAG_DDP, "num_reduce": 1}
            rows += [row(s, opt=0, grad=s + 1, param=6, grad_norm=second, **flags), row(s + 1, opt=1, grad=s + 50 * rank + 1, param=6 + rank)]
        made.append(recording(events, rows, rank=rank, world_size=2))
    return run(made, exits=(0, 0))


@pytest.mark.parametrize(("norms", "line"), [
    ({"first": (1.0, 1.0), "second": (1.0, 2.0)}, None),  # the second's gradients differ, and so may their norms
    ({"first": (1.0, 2.0), "second": (1.0, 3.0)}, 60),  # the first is averaged afterwards
])  # fmt: skip
def test_a_norm_belongs_to_what_was_clipped(norms: Mapping[str, tuple[float, float]], line: int | None) -> None:
    found = findings(CHECKS["SYN117"], two_clips(norms))
    assert [(f.where.line if f.where else 0, f.severity) for f in found] == ([(line, Severity.ERROR)] if line else [])
    if line:
        assert "1 to 2; 6 steps, of which 6" in found[0].notes[0]
        assert [f.severity for f in findings(CHECKS["SYN117"], two_clips(norms, limit=9.0))] == [Severity.ADVICE]


def members_of(*, nums: tuple[int, int] = (3, 2), seeds: tuple[int, int] = (1, 2), lines: tuple[int, ...] = (22, 22, 22), code: int = 0) -> Run:
    """Each rank trains a few models, one after the other, four steps each."""
    made = []
    for rank in (0, 1):
        events = [event("pg", done=True, rank=rank, world_size=2), event("seed", what="torch", value=seeds[rank])]
        for opt in range(nums[rank]):
            events += [event("params", line=lines[opt], s=4 * opt, opt=opt, names=NAMES, numels=[4] * 4, ddp=[-1] * 4)]
            events += [event("initial", s=4 * opt, opt=opt, each=[seeds[rank], opt])]
        rows = [row(4 * opt + n, opt=opt, grad=n + 9 * rank + 1, param=n + 9 * rank + 1) for opt in range(nums[rank]) for n in range(4)]
        made.append(recording(events, rows, rank=rank, world_size=2))
    return run(made, exits=(code, 0))


@pytest.mark.parametrize(("fields", "severity"), [
    ({}, None),  # five folds over two ranks
    ({"nums": (2, 2)}, Severity.ADVICE),  # four: so looks an ensemble whose wrap was forgotten
    ({"nums": (3, 1)}, Severity.ADVICE),
    ({"code": 1}, Severity.ADVICE),  # one rank did not come to its last
    ({"lines": (22, 22, 33)}, Severity.ADVICE),
    ({"seeds": (1, 1)}, Severity.ERROR),
])  # fmt: skip
def test_members_that_are_dealt_out_unevenly(fields: Mapping[str, Any], severity: Severity | None) -> None:
    assert [f.severity for f in findings(CHECKS["SYN126"], members_of(**fields))] == ([severity] if severity else [])
