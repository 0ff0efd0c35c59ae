"""Ranks that share no step number, or no model, by design: rounds, Join, streams of unequal length, members of a population, tables of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from builder import event, findings, recording, row, run
from replica_runs import NAMES, by_rank, setup, two_ranks, wrap_event

from harness.checks.base import Check
from harness.checks.registry import all_checks
from harness.model import Severity
from harness.probe import protocol
from harness.record import Event, Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}
APART = by_rank(grad=(5, 55), param=(6, 66))
WRONG = {"grad": (0,), "param": (0,)}


def coll(op: str, s: int, **fields: Any) -> Event:
    told = {"op": op, "numel": 1, "dtype": "float32", "n": 0, "grad": False, "world": True, "names": []}
    return event("coll", line=86, s=s, **(told | fields))


@pytest.mark.parametrize(("closed", "fires"), [
    ({"steps": 5, "num_batches": 6, "complete": False}, False),  # the other rank had no more: the batch in hand is dropped
    ({"steps": 5, "num_batches": 6, "complete": True}, False),
    ({"steps": 5, "num_batches": 5, "complete": False}, True),
    ({"steps": 0, "num_batches": 1, "complete": False}, True),  # a look at one batch of another loader
    (None, True),
])  # fmt: skip
def test_a_batch_that_a_longer_stream_drops_at_its_end_is_none_that_was_skipped(closed: dict[str, Any] | None, fires: bool) -> None:
    def each(rank: int, step: int) -> dict[str, Any]:
        return {"num_batches": 2 if rank == 0 and step == 5 else 1}

    passes = [event("pass", s=5, backwards=5, line=30, **closed)] if closed else []
    assert bool(findings(CHECKS["SYN119"], two_ranks(each=each, extra=lambda rank: passes if rank == 0 else []))) == fires


ROUNDS = ((5, 9, 20), (7, 16, 20))  # steps at which a rank averages, one a round


def clients(numel: int, *, ends: tuple[int, int] = (20, 20), op: str = "all_reduce", odd: int = 0) -> Run:
    """Two ranks that take steps of their own number between two averages of a model of 40 elements."""
    made = []
    for rank, steps in enumerate(ends):
        events = [*setup(rank, ddp=False), *(coll(op, s, numel=numel + odd * (rank and s == 16)) for s in ROUNDS[rank])]
        rows = [row(s, grad=5 + rank, param=9 + rank, num_coll=int(s in ROUNDS[rank])) for s in range(steps)]
        made.append(recording(events, rows, rank=rank, world_size=2))
    return run(made, exits=(0, 0))


@pytest.mark.parametrize(("made", "fires"), [
    (clients(40), False),
    (clients(-1, op="all_gather_object"), False),
    (clients(40, ends=(20, 21)), False),
    (clients(1), True),  # `if loss > limit: dist.all_reduce(loss)`
    (clients(40, odd=-36), True),  # what meets does not belong together
])  # fmt: skip
def test_rounds_of_local_steps_that_end_at_one_number(made: Run, fires: bool) -> None:
    assert bool(findings(CHECKS["SYN122"], made)) == fires


def joined(hyper: Callable[[int, int, int], int], grad: Callable[[int, int, int], int] = lambda rank, epoch, i: 50 * epoch + i + 1) -> Run:
    """Rank 0 takes 5 steps in each of three Join contexts, rank 1 takes 4; functions of (rank, epoch, step in it)."""
    made = []
    for rank, num in enumerate((5, 4)):
        events = [*setup(rank), *(event("join", s=epoch * num, line=20) for epoch in range(3))]
        rows = [row(e * num + i, lr=0.1 * hyper(rank, e, i), hyper=hyper(rank, e, i), grad=grad(rank, e, i), param=7, num_reduce=1) for e in range(3) for i in range(num)]
        made.append(recording(events, rows, rank=rank, world_size=2))
    return run(made, exits=(0, 0))


@pytest.mark.parametrize(("made", "steps"), [
    (joined(lambda rank, epoch, i: epoch + 1), None),  # stepped an epoch
    (joined(lambda rank, epoch, i: 10 * epoch + i + 1), None),  # set by a progress that all share
    (joined(lambda rank, epoch, i: (5 - rank) * epoch + i + 1), 5),  # stepped a batch: those of rank 1 are fewer
    (joined(lambda rank, epoch, i: epoch + 1 + rank * (epoch > 1)), 10),  # a metric of its own
    (joined(lambda rank, epoch, i: epoch + 1 + rank * (epoch > 1), lambda rank, epoch, i: 9 + rank), None),  # something else came before it
])  # fmt: skip
def test_rates_are_compared_at_the_same_step_of_a_join(made: Run, steps: int | None) -> None:
    found = findings(CHECKS["OPT103"], made)
    assert [f"from step {steps} on" in f.message for f in found] == ([True] if steps else [])


def beside(rank: int, **params: Any) -> list[Event]:
    """DDP wraps something; this optimizer's parameters are outside of it, and start as each rank drew them."""
    told = [event("pg", done=True, rank=rank, world_size=2), wrap_event(names=["body.weight"])]
    fields = {"opt": 0, "kind": "SGD", "names": NAMES, "numels": [4, 16, 4, 16], "ddp": [-1] * 4, "owned": [True] * 4, "requires_grad": [True] * 4}
    return [*told, event("params", line=22, **(fields | params)), event("initial", opt=0, each=[1 + 10 * rank, 2, 3, 4])]


@pytest.mark.parametrize(("shapes", "messages", "fires"), [
    (((4, 16), (4, 16)), [], True),
    (((4, 16), (6, 24)), [], False),  # tables of other sizes
    (((4, 16), (4, 16)), [coll("isend", s, inside=True, numel=8) for s in range(3)], False),  # gradients go home to the rank that owns the table
    (((4, 16), (4, 16)), [coll("isend", s, numel=8) for s in range(3)], True),  # anything may be sent
    (((4, 16), (4, 16)), [coll("all_gather", s, inside=True, numel=8) for s in range(3)], False),
    (((4, 16), (4, 16)), [coll("scatter", s, inside=True, numel=8) for s in range(3)], False),  # torch.distributed.nn's all_gather
    (((4, 16), (4, 16)), [coll("all_gather", s, inside=True, numel=8, hook=True) for s in range(3)], True),
    (((4, 16), (4, 16)), [coll("all_gather", s, inside=i, numel=8) for s in range(3) for i in (False, True)], True),  # a forward run anew
])  # fmt: skip
def test_tables_that_a_rank_owns_are_no_parameters_that_ddp_lacks(shapes: tuple[tuple[int, int], ...], messages: list[Event], fires: bool) -> None:
    def start(rank: int) -> list[Event]:
        small, big = shapes[rank]
        return [*beside(rank, shapes=[[small], [big], [small], [big]]), event("wrapping", line=20, each=[7]), *messages]

    assert bool(findings(CHECKS["SYN114"], two_ranks(setup_of=start, each=APART, wrong=WRONG))) == fires


@pytest.mark.parametrize(("called", "fires"), [
    ([{"numel": 4, "beside": True}], False),  # the one that parts is averaged after the step
    ([{"numel": 4}], True),  # as many elements of something else, a clone of it for one
    ([{"numel": 16, "beside": True}], True),  # another one
    ([{"numel": 4, "beside": True, "s": 2}], True),  # once
])  # fmt: skip
def test_values_that_the_script_averages_need_no_ddp(called: list[dict[str, Any]], fires: bool) -> None:
    def start(rank: int) -> list[Event]:
        told = [coll(**({"op": "all_reduce", "s": s} | fields)) for s in range(3) for fields in called if fields.get("s", s) == s]
        return [*beside(rank, shapes=[[4]] * 4), *told]

    assert bool(findings(CHECKS["SYN114"], two_ranks(setup_of=start, each=APART, wrong=WRONG))) == fires


@pytest.mark.parametrize(("op", "severity"), [("isend", None), ("all_gather", Severity.ADVICE), ("scatter", Severity.ERROR)])
def test_a_seed_by_rank_parts_all_parameters_and_owns_none(op: str, severity: Severity | None) -> None:
    def start(rank: int) -> list[Event]:
        return [*beside(rank, shapes=[[4]] * 4), event("wrapping", line=20, each=[7 + rank]), *(coll(op, s, inside=True, numel=8) for s in range(3))]

    found = findings(CHECKS["SYN114"], two_ranks(setup_of=start, each=APART, wrong=WRONG))
    assert [f.severity for f in found] == ([severity] if severity else [])


def searched(*, hyper: tuple[int, int] = (1, 2), wrapped: tuple[int, int] = (7, 7), sampler: bool = False, beside_ddp: bool = False, draws: bool = False) -> Run:
    """12 steps without DDP, each rank its own model, then 12 of a model that DDP wraps."""
    made = []
    for rank in (0, 1):
        base = {"opt": 0, "kind": "SGD", "names": NAMES, "numels": [4, 16, 4, 16], "owned": [True] * 4, "requires_grad": [True] * 4, "shapes": [[4], [16], [4], [16]]}
        wraps = 0 if beside_ddp else 12
        events = [
            event("pg", done=True, rank=rank, world_size=2),
            event("params", line=22, **(base | {"ddp": [-1] * 4})),
            event("initial", opt=0, each=[1 + rank, 2, 3, 4]),
            event("wrapping", s=wraps, line=40, names=NAMES, shapes=[[4], [4, 4], [4], [4, 4]], each=[wrapped[rank]] * 4),
            wrap_event(group_size=2),
            event("params", s=12, line=42, **(base | {"opt": 1, "ddp": [0] * 4})),
            event("initial", s=12, opt=1, each=[7] * 4),
            *([event("loader", s=3, line=30, distributed={"num_replicas": 2, "rank": rank})] if sampler else []),
            *(event("draw", s=s, line=33, at=s, fn="randint", digest=s + 1, num=8, numel=8, rows=8, grad=True, data=True) for s in range(12) if draws),
        ]
        alone = [row(s, opt=0, grad=s + 100 * rank + 1, param=s + 100 * rank + 1, hyper=hyper[rank], num_reduce=int(beside_ddp)) for s in range(12)]
        together = [row(s, opt=1, grad=s, param=s, hyper=9, num_reduce=1, num_forward=1, flags=protocol.FLAG_DDP) for s in range(12, 24)]
        made.append(recording(events, [*alone, *together], rank=rank, world_size=2))
        made[-1].params = details(rank)
    return run(made, exits=(0, 0))


def details(rank: int) -> bytes:
    import struct

    return b"".join(protocol.DETAIL.pack(s, 0, 4) + struct.pack("<8I", *[s + 100 * rank + 1] * 8) for s in range(12))


@pytest.mark.parametrize(("fields", "severity"), [
    ({}, None),  # a search
    ({"hyper": (1, 1)}, Severity.ADVICE),  # folds?
    ({"wrapped": (7, 8)}, Severity.ERROR),  # warmed up alone, and wrapped as each rank has it
    ({"hyper": (1, 1), "wrapped": (7, 8)}, Severity.ERROR),
    ({"sampler": True}, Severity.ERROR),  # data are shared out: the wrap came too late
    ({"hyper": (1, 1), "sampler": True}, Severity.ERROR),
    ({"beside_ddp": True}, Severity.ADVICE),  # no search, but each rank's own all the same: heads of clients
    ({"hyper": (1, 1), "beside_ddp": True}, Severity.ERROR),
    ({"sampler": True, "beside_ddp": True}, Severity.ERROR),
])  # fmt: skip
def test_a_search_before_the_ranks_train_together(fields: Mapping[str, Any], severity: Severity | None) -> None:
    assert [f.severity for f in findings(CHECKS["SYN114"], searched(**fields))] == ([severity] if severity else [])


def test_rates_of_a_search_are_each_ranks_own() -> None:
    assert findings(CHECKS["OPT103"], searched()) == []
    assert len(findings(CHECKS["OPT103"], two_ranks(each=by_rank(hyper=(1, 2))))) == 1


def test_the_same_batches_for_all_points_of_a_search_are_meant() -> None:
    assert findings(CHECKS["DAT109"], searched(draws=True)) == []
    assert len(findings(CHECKS["DAT109"], searched(draws=True, sampler=True))) == 1


@pytest.mark.parametrize(("evals", "fires"), [
    (([], []), False),  # two tables here, one there
    (([], ["drop"]), True),
    ((["drop"], ["drop"]), True),  # how many modules that leaves in train mode is not told
    (None, True),
])  # fmt: skip
def test_another_number_of_modules_is_no_other_mode(evals: tuple[list[str], list[str]] | None, fires: bool) -> None:
    def extra(rank: int) -> list[Event]:
        return [event("train_flags", opt=0, num_eval=len(evals[rank]), eval=evals[rank], tops=[True])] if evals else []

    assert bool(findings(CHECKS["SYN120"], two_ranks(each=by_rank(train=(3, 4)), extra=extra))) == fires


@pytest.mark.parametrize(("leaves", "later", "fires"), [
    (40, (8, 8), False),  # weights as objects: the next client starts from their average
    (12, (8, 8), True),  # a few numbers
    (40, (8, 9), True),  # predictions
    (40, (1, 1), True),  # the first start, once more
])  # fmt: skip
def test_weights_that_are_averaged_as_objects(leaves: int, later: tuple[int, int], fires: bool) -> None:
    def extra(rank: int) -> list[Event]:
        return [event("gathered", s=4, line=50, op="all_gather_object", leaves=leaves, values=[]), event("initial", s=5, opt=1, each=[later[rank], 2, 3, 4])]

    made = two_ranks(ddp=False, each=lambda rank, s: {"grad": 5 + s + 90 * rank, "param": 6 + s + 90 * rank}, extra=extra)
    assert bool(findings(CHECKS["SYN126"], made)) == fires


def folds(*, steps: tuple[int, int], goes_on: bool = False, wrapped: tuple[int, int] = (7, 7)) -> Run:
    """Ranks that take steps of their own number before DDP wraps a model, then 6 together."""
    made = []
    for rank, num in enumerate(steps):
        events = [
            event("pg", done=True, rank=rank, world_size=2), event("params", line=22, opt=0, names=NAMES, ddp=[-1] * 4),
            event("wrapping", s=num, line=40, names=NAMES, each=[wrapped[rank]] * 4), wrap_event(), event("params", s=num, line=42, opt=1, names=NAMES, ddp=[0] * 4),
            coll("all_reduce", num + 3),
        ]  # fmt: skip
        rows = [*(row(s, opt=0, grad=rank + 1) for s in range(num)), *(row(s, opt=1, grad=9) for s in range(num, num + 6))]
        rows += [row(num + 6, opt=0)] if goes_on else []
        made.append(recording(events, rows, rank=rank, world_size=2))
    return run(made)


def test_steps_before_the_wrap_are_left_out_where_the_ranks_take_other_numbers_of_them() -> None:
    uneven = folds(steps=(9, 6))
    assert [r.num_rows for r in uneven.present] == [6, 6] and [list(r.column("opt")) for r in uneven.present] == [[0] * 6] * 2
    assert [e.step for _, e in uneven.events("coll")] == [3, 3] and all(s.complete and s.same("grad") for s in uneven.steps())
    assert [r.num_rows for r in folds(steps=(6, 6)).present] == [12, 12]  # steps have one number all the same
    assert [r.num_rows for r in folds(steps=(9, 6), goes_on=True).present] == [16, 13]
    assert [r.num_rows for r in folds(steps=(9, 6), wrapped=(7, 8)).present] == [15, 12]  # a warm-up alone: the wrap came too late


def dealt(*, members: tuple[int, int] = (3, 2), flags: int = protocol.FLAG_DDP, called: int = 0, late: int = 0) -> Run:
    """Five trials over two ranks, of four steps each, between six steps that the ranks share and six more."""
    made = []
    for rank, num in enumerate(members):
        opts = [*[0] * 6, *(1 + i for i in range(num) for _ in range(4)), *[1 + num] * (6 + late * rank)]
        shared = [opt in (0, 1 + num) for opt in opts]
        rows = [row(s, opt=o, flags=flags * both, num_coll=called if both else 0) for s, (o, both) in enumerate(zip(opts, shared, strict=True))]
        made.append(recording([event("pg", done=True, rank=rank, world_size=2)], rows, rank=rank, world_size=2))
    return run(made)


@pytest.mark.parametrize(("fields", "left"), [
    ({}, [12, 12]),
    ({"flags": 0, "called": 4}, [12, 12]),  # averaged by hand
    ({"members": (2, 2)}, [20, 20]),  # steps have one number all the same; a wrap may have been forgotten
    ({"flags": 0}, [24, 20]),  # nothing is ever shared
    ({"late": 1}, [24, 21]),  # nor is this the same training
])  # fmt: skip
def test_trials_that_are_dealt_out_between_shared_steps_are_left_out(fields: Mapping[str, Any], left: list[int]) -> None:
    assert [r.num_rows for r in dealt(**fields).present] == left
