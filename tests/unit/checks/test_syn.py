"""SYN: each check fires on its fault and is silent on the healthy run beside it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from builder import event, findings, recording, row, run, site
from replica_runs import NAMES, by_rank, setup, two_ranks, wrap_event

from harness.checks.engine import judge
from harness.checks.out.under_rank0 import CollectiveUnderRank0
from harness.checks.registry import all_checks
from harness.checks.syn import (
    added,
    alone,
    autograd_grad,
    buffers,
    bypass,
    clip_local,
    diverge,
    dtype,
    extra,
    frozen,
    frozen_differs,
    gathered,
    init_after_wrap,
    initial,
    moved,
    no_effect,
    no_sync,
    none_grads,
    order,
    outside,
    partly,
    rebound,
    reentrant,
    shapes,
    skipped,
    sum_gradients,
    swapped,
    train_flag,
    unfrozen,
    unused,
    unused_one,
)  # fmt: skip
from harness.model import OutcomeKind, Severity
from harness.probe.protocol import FLAG_DDP, FLAG_NO_SYNC
from harness.record import Event, Run

GRADS_DIFFER = by_rank(grad=(5, 55), param=(6, 66))
REDUCTION = "Expected to have finished reduction in the prior iteration"


def changed(what: str, names: list[str], **fields: Any) -> Any:
    return lambda rank: [event("wrap_changed", line=40, index=0, what=what, names=names), *fields.get("more", [])]


def coll(op: str, line: int, n: int, *, s: int = 1, numel: int = 1, dtype: str = "float32", grad: bool = False, names: tuple[str, ...] = ()) -> Event:
    return event("coll", line=line, op=op, numel=numel, dtype=dtype, n=n, grad=grad, world=True, s=s, names=list(names))


def failed(rank: int) -> list[Event]:
    return [event("failure", line=44, type="RuntimeError", message=REDUCTION, frames=[], phase="train")]


FAULTS: dict[str, tuple[Any, Run, int | None]] = {
    "bypass": (bypass, two_ranks(each=by_rank(grad=(5, 55), num_reduce=(0, 0)), extra=lambda r: [event("bypass", line=31, index=0, num=4, names=NAMES)],
                                 wrong={"grad": (0, 1, 2, 3)}), 31),
    "no_sync": (no_sync, two_ranks(each=by_rank(grad=(5, 55), flags=(FLAG_DDP | FLAG_NO_SYNC, FLAG_DDP | FLAG_NO_SYNC)),
                                   extra=lambda r: [event("no_sync", line=33, index=0)], wrong={"grad": (0,)}), 33),
    "moved": (moved, two_ranks(each=by_rank(grad=(5, 55), num_reduce=(0, 0)), extra=lambda r: [event("wrap_moved", line=24, index=0)], wrong={"grad": (0,)}), 24),
    "unfrozen": (unfrozen, two_ranks(each=GRADS_DIFFER, extra=changed("unfrozen", ["0.weight"]), wrong={"grad": (1,)}), 40),
    "added": (added, two_ranks(each=GRADS_DIFFER, extra=changed("added", ["1.weight"]), wrong={"grad": (3,)}), 40),
    "rebound": (rebound, two_ranks(each=GRADS_DIFFER, extra=changed("rebound", ["1.bias"]), wrong={"grad": (2,)}), 40),
    "frozen": (frozen, two_ranks(steps=1, extra=lambda r: [*changed("frozen", ["0.bias"])(r), *failed(r)], exits=(1, 1)), 40),
    "order": (order, two_ranks(setup_of=lambda r: [*setup(r), event("wrapping", line=20, names=NAMES)][2 * 0 :] if r == 0 else
                               [event("pg", done=True, rank=1, world_size=2), event("wrapping", line=20, names=NAMES[::-1]), wrap_event(), *setup(1)[3:]]), 20),
    "shapes": (shapes, two_ranks(setup_of=lambda r: [event("pg", done=True, rank=r, world_size=2),
                                                     event("wrapping", line=20, names=["0.weight"], shapes=[[16 - 4 * r, 8]]), *setup(r)[2:]]), 20),
    "unused": (unused, two_ranks(extra=lambda r: [event("no_gradient", opt=0, names=["1.weight"]), event("loss", line=30)]), 30),
    "unused_one": (unused_one, two_ranks(extra=lambda r: [event("loss", line=30)] + [event("no_gradient", opt=0, names=["1.weight"])] * r), 30),
    "reentrant": (reentrant, two_ranks(each=GRADS_DIFFER, extra=lambda r: [event("checkpoint", line=12, reentrant=True)], wrong={"grad": (1,)}), 12),
    "autograd_grad": (autograd_grad, two_ranks(each=by_rank(param=(6, 66), num_reduce=(0, 0)), extra=lambda r: [event("autograd_grad", line=35, num=4)]), 35),
    "outside": (outside, two_ranks(each=GRADS_DIFFER, setup_of=lambda r: setup(r, ddp=True) if False else
                                   [*setup(r)[:3], event("params", line=22, opt=0, kind="SGD", names=NAMES, numels=[1] * 4, ddp=[0, 0, 0, -1], owned=[True] * 4)],
                                   wrong={"grad": (3,), "param": (3,)}), 22),
    "frozen_differs": (frozen_differs, two_ranks(extra=lambda r: [event("others", models=[{"module": "Linear", "num": 2, "digest": r, "called": True,
                                                                                          "grad": False, "names": ["weight"]}])]), 20),
    "buffers": (buffers, two_ranks(each=by_rank(buffer=(1, 2)), setup_of=lambda r: [*setup(r)[:2], wrap_event(buffers=["ema"]), *setup(r)[3:]]), 20),
    "clip_local": (clip_local, two_ranks(ddp=False, each=by_rank(grad_norm=(1.0, 2.0)), extra=lambda r: [event("clip", line=36, norm=1.0, max_norm=0.5)]), 36),
    "none_grads": (none_grads, two_ranks(ddp=False, extra=lambda r: [coll("all_reduce", 37, i, numel=4 + i, grad=True) for i in range(4 - r)], exits=(-6, -6)), 37),
    "skipped": (skipped, two_ranks(each=lambda r, s: {"num_batches": 1 + (r == 1 and s == 4)}), None),
    "train_flag": (train_flag, two_ranks(each=by_rank(train=(9, 10)), extra=lambda r: [event("mode", line=28, training=False)] * r), 28),
    "swapped": (swapped, two_ranks(extra=lambda r: [coll("all_reduce", 50 + r, 0), coll("all_reduce", 51 - r, 1)]), 51),
    "extra": (extra, two_ranks(each=by_rank(num_coll=(1, 0)), extra=lambda r: [coll("all_reduce", 52, 0)] * (1 - r)), 52),
    "dtype": (dtype, two_ranks(extra=lambda r: [coll("all_reduce", 53, 0, dtype=("float32", "int32")[r])]), 53),
    "sum_gradients": (sum_gradients, two_ranks(ddp=False, extra=lambda r: [
        *[event("gradients", s=s, opt=0, local={"0": [1.0 + r, 2.0]}, at_step={"0": [3.0, 4.0]}) for s in range(3)],
        event("loss", line=30, scaled=False, reduction="mean"), coll("all_reduce", 38, 0, numel=4, grad=True)]), 38),
    "init_after_wrap": (init_after_wrap, two_ranks(each=by_rank(param=(6, 66)), setup_of=lambda r: [
        *setup(r)[:4], event("initial", opt=0, each=[1, 2 + r, 3, 4]), event("apply", line=21)], wrong={"param": (1,)}), 21),
    "gathered": (gathered, two_ranks(extra=lambda r: [event("cut_gather", line=71, op="all_gather", numel=64, product="MmBackward0", own=False)]), 71),
    "alone": (alone, two_ranks(ddp=False, each=lambda r, s: {"grad": 5 + r, "param": 10 * s + r}, wrong={"grad": (0, 1, 2, 3), "param": (0, 1, 2, 3)}), 22),
    "diverge": (diverge, two_ranks(each=lambda r, s: {"grad": 5 + r * (s > 3), "param": 6 + r * (s > 3)}, wrong={"grad": (1,), "param": (1,)}), None),
    "partly": (partly, two_ranks(ddp=False, each=GRADS_DIFFER, wrong={"grad": (0,), "param": (0,)}, extra=lambda r: [coll("all_reduce", 39, 0)]), 39),
    "initial": (initial, two_ranks(ddp=False, each=by_rank(param=(6, 66)), setup_of=lambda r: [
        *setup(r, ddp=False)[:2], event("initial", opt=0, each=[1 + r, 2, 3, 4])]), 22),
    "no_effect": (no_effect, two_ranks(ddp=False, each=GRADS_DIFFER, wrong={"grad": (0, 1, 2, 3)}, extra=lambda r: [coll("all_reduce", 41, s, s=s, numel=40) for s in range(12)]), 41),
}  # fmt: skip


def the_check(module: Any) -> Any:
    return next(c for c in all_checks() if c.__module__ == module.__name__)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_at_its_line(name: str) -> None:
    module, faulty, line = FAULTS[name]
    found = findings(the_check(module), faulty)
    assert len(found) == 1
    assert found[0].code == the_check(module).code
    if line is not None:
        assert found[0].where is not None and found[0].where.line == line


@pytest.mark.parametrize("name", FAULTS)
def test_the_healthy_run_is_left_alone(name: str) -> None:
    check = the_check(FAULTS[name][0])
    assert findings(check, two_ranks()) == []
    assert findings(check, two_ranks(ddp=False)) == []


def test_every_check_of_the_family_is_tried_here() -> None:
    codes = {c.code for c in all_checks() if c.code.startswith("SYN")}
    elsewhere = {"SYN131", "SYN134", "SYN135", "SYN136", "SYN137", "SYN138", "SYN139", "SYN141", "SYN142", "SYN143", "SYN144", "SYN145", "SYN146"}  # test_syn_*.py, test_handles.py
    assert codes - elsewhere == {the_check(module).code for module, _, _ in FAULTS.values()}


def test_a_collective_under_rank_0_is_found_where_the_run_hung() -> None:
    hung = two_ranks(extra=lambda r: [coll("barrier", 60, 0)] * (1 - r), reason="hang")
    assert [f.where.line for f in findings(CollectiveUnderRank0, hung) if f.where] == [60]
    assert findings(CollectiveUnderRank0, two_ranks(extra=lambda r: [coll("barrier", 60, 0)], reason="hang")) == []


def test_a_loop_over_a_dict_in_another_order_is_a_swap() -> None:
    names = ("name='accuracy'", "name='loss'")
    swap = two_ranks(extra=lambda r: [coll("all_reduce", 18, i, names=("value", names[(i + r) % 2])) for i in (0, 1)])
    (found,) = findings(the_check(swapped), swap)
    assert "accuracy" in found.notes[0] and found.where is not None and found.where.line == 18
    alike = two_ranks(extra=lambda r: [coll("all_reduce", 18, i, names=("value", names[i])) for i in (0, 1)])
    assert findings(the_check(swapped), alike) == []


def test_a_normaliser_before_the_model_follows_each_ranks_data() -> None:
    def fed(late: tuple[int, int], early: int = 1) -> Run:
        return two_ranks(extra=lambda r: [event("feeder", module="RunningNorm", made=site(51), buffers=["mean"], early=early, late=late[r])])

    (found,) = findings(the_check(buffers), fed((5, 6)))
    assert found.where is not None and found.where.line == 51 and "RunningNorm" in found.message
    assert findings(the_check(buffers), fed((5, 5))) == [] and findings(the_check(buffers), fed((1, 6))) == []


@pytest.mark.parametrize("line", [55, 56])
def test_a_broadcast_from_two_lines_is_healthy(line: int) -> None:
    healthy = two_ranks(extra=lambda r: [coll("broadcast", 55 + r, 0), coll("all_reduce", line, 1)])
    assert findings(the_check(swapped), healthy) == []
    assert findings(the_check(dtype), healthy) == []


def test_a_run_whose_parameters_are_averaged_by_hand_is_healthy() -> None:
    averaged = two_ranks(ddp=False, each=GRADS_DIFFER, wrong={"grad": (0, 1, 2, 3)}, extra=lambda r: [
        coll("all_reduce", 41, 0, numel=40), *[event("before", opt=0, s=s, digest=s) for s in range(12)]])  # fmt: skip
    for module in (no_effect, alone, diverge):
        assert findings(the_check(module), averaged) == []


def test_a_round_of_local_steps_is_averaged_behind_its_last() -> None:
    """All calls come after the optimizer's last step: the next round has an optimizer of its own."""
    extra_of = lambda r: [coll("all_reduce", 41, s, s=12 + s, numel=40) for s in range(8)]  # noqa: E731
    rounds = two_ranks(ddp=False, each=GRADS_DIFFER, wrong={"grad": (0, 1, 2, 3)}, extra=extra_of)
    assert findings(the_check(no_effect), rounds) == []


def test_local_epochs_of_unequal_length() -> None:
    def client(rank: int, steps: int, calls_at: tuple[int, ...]) -> Any:
        calls = [coll("all_reduce", 50, n, s=at) for n, at in enumerate(calls_at)]
        return recording(calls, [row(s, num_coll=int(s in calls_at)) for s in range(2 * steps)], rank=rank, world_size=2)

    averaged = run([client(0, 4, (4, 7)), client(1, 7, (7, 13))])
    assert findings(the_check(extra), averaged) == []
    one_more = run([client(0, 4, (4, 7)), client(1, 7, (2, 7, 13))])
    assert len(findings(the_check(extra), one_more)) == 1


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_truncated_and_empty_recordings_crash_no_check(kept: int) -> None:
    for _, faulty, _ in FAULTS.values():
        cut = [recording(r.events[: kept + 1], [r.rows[: 244 * kept + 100]], rank=r.rank, pid=r.pid) for r in faulty.present]
        outcomes, _ = judge(run(cut))
        assert [o.reason for o in outcomes if o.kind is OutcomeKind.CRASHED] == []
    outcomes, _ = judge(run([]))
    assert [o.reason for o in outcomes if o.kind is OutcomeKind.CRASHED] == []


def test_constant_negatives_beside_the_own_embeddings_are_advice() -> None:
    told = two_ranks(extra=lambda r: [event("cut_gather", line=71, op="all_gather", numel=64, product="MmBackward0", own=True)])
    assert [f.severity for f in findings(the_check(gathered), told)] == [Severity.ADVICE]


@pytest.mark.parametrize(("max_norm", "severity"), [(math.inf, None), (5.0, Severity.ADVICE), (1.5, Severity.ERROR), (None, Severity.ERROR)])
def test_norms_that_differ_matter_where_something_is_clipped(max_norm: float | None, severity: Severity | None) -> None:
    """Norms 1 and 2; without a limit they are only logged."""
    made = two_ranks(ddp=False, each=by_rank(grad_norm=(1.0, 2.0)), extra=lambda r: [event("clip", line=36, norm=1.0, max_norm=max_norm)])
    assert [f.severity for f in findings(the_check(clip_local), made)] == ([severity] if severity is not None else [])


@pytest.mark.parametrize(("backend", "dtypes", "fires"), [("nccl", ("float32",) * 2, False), ("gloo", ("float32",) * 2, True), ("nccl", ("float32", "int32"), True)])
def test_nccl_gathers_lists_of_unequal_size(backend: str, dtypes: tuple[str, str], fires: bool) -> None:
    group = event("pg", done=True, backend=backend, world_size=2)
    made = two_ranks(extra=lambda r: [group, coll("all_gather", 53, 0, numel=3 + r, dtype=dtypes[r])])
    assert bool(findings(the_check(dtype), made)) is fires


def beside_ddp(own: Callable[[int], list[str]], *, extra: Callable[[int], list[Event]] = lambda r: [], starts: tuple[int, int] = (4, 5)) -> Run:
    """An optimizer whose fourth parameter no DDP owns; its name and its start by rank."""
    return two_ranks(each=GRADS_DIFFER, extra=extra, wrong={"grad": (3,), "param": (3,)}, setup_of=lambda r: [
        *setup(r)[:3], event("params", line=22, opt=0, kind="SGD", names=[*NAMES[:3], *own(r)], numels=[1] * 4, ddp=[0, 0, 0, -1], owned=[True] * 4),
        event("initial", opt=0, each=[1, 2, 3, starts[r]])])  # fmt: skip


def rows_travel(rank: int) -> list[Event]:
    return [coll("all_to_all_single", 60, s, s=s, numel=64) for s in range(12)]


def test_what_one_rank_owns_is_no_replica() -> None:
    check = the_check(outside)
    same = lambda r: ["tables.weight"]  # noqa: E731
    assert findings(check, beside_ddp(lambda r: [f"tables.{r}.weight"])) == []  # others on each rank
    assert findings(check, beside_ddp(same, extra=rows_travel)) == []  # one name, but rows travel and the starts differ
    assert len(findings(check, beside_ddp(same))) == 1  # a head that each rank seeded by itself
    assert len(findings(check, beside_ddp(same, extra=rows_travel, starts=(4, 4)))) == 1  # made equal: meant to stay so
    assert len(findings(check, beside_ddp(lambda r: ["head.weight", *["scale"] * r]))) == 1  # a rank with one more, behind it
