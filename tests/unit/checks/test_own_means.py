"""SYN124, OPT108 and OPT132 where the loss bears a factor, or hooks reduce the gradients: is the factor the division?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from builder import event, findings, site
from replica_runs import two_ranks

from harness.checks.opt.accumulation import AccumulationUnscaled
from harness.checks.opt.averaged_again import AveragedAgain
from harness.checks.syn.own_means import bears_no_division, is_plain
from harness.checks.syn.sum_gradients import GradientSum
from harness.model import Severity
from harness.record import Event, Run

ROWS, CLASSES = 16, 4
SITE = site(30)


def loss(*terms: tuple[float, float, bool, tuple[int, ...]], **fields: Any) -> Event:
    told = [[outer, factor, mean, list(sizes)] for outer, factor, mean, sizes in terms]
    return event("loss", line=30, **({"scaled": True, "reduction": "sum", "rows": ROWS, "joined": False, "terms": told} | fields))


def run_of(one: Event, backwards: int | tuple[int, ...] = 1, synced: float = 1.0, more: Sequence[Event] = ()) -> Run:
    """Gradients that are summed by hand (times `synced`), after so many backwards a step."""

    def extra(rank: int) -> list[Event]:
        gradients = [
            event("gradients", s=s, opt=0, local={"0": [1.0 + rank, 2.0]}, at_step={"0": [3.0 * synced, 4.0 * synced]}) for s in range(3)
        ]
        counts = backwards if isinstance(backwards, tuple) else (backwards,) * 6
        steps = [event("accumulation", line=40, opt=0, s=s, sites=[[SITE, n]]) for s, n in enumerate(counts)]
        calls = [event("coll", line=38, op="all_reduce", numel=n, n=n, s=0, dtype="float32", grad=False, world=True, names=[]) for n in (1, 40)]
        return [*gradients, *steps, *calls, *more, one]

    return two_ranks(ddp=False, extra=extra)


OWN = (1.0, 1 / ROWS, False, (ROWS,))


@pytest.mark.parametrize(
    ("one", "backwards"),
    [
        (loss(OWN), 1),
        (loss((1.0, 1 / (ROWS * CLASSES * 8), False, (ROWS, CLASSES * 8))), 1),  # by its elements
        (loss((1.0, 1.0, True, (ROWS * 32,)), (1.0, 0.1, True, (ROWS, 8))), 1),  # tokens, and a term that weighs less
        (loss((1.0, 0.3, True, (ROWS,)), (1.0, 0.7, True, (ROWS,))), 1),  # mixup
        (loss(OWN, rows=0), 1),  # the batch is cut by hand
        (loss((1.0, 0.25, True, (ROWS,)), reduction="mean"), 4),  # by the number of micro-batches
        (loss((0.25, 1.0, True, (ROWS,)), (0.25, 1.0, True, (ROWS,)), reduction="mean"), 4),
        (loss((1.0, 1 / (ROWS * 4), False, (ROWS,))), 4),
    ],
)
def test_a_mean_over_the_ranks_own_samples_bears_no_division(one: Event, backwards: int) -> None:
    run = run_of(one, backwards)
    assert bears_no_division(run, one)
    found = findings(GradientSum, run)
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SYN124", Severity.ERROR, 38)]


@pytest.mark.parametrize(
    ("one", "backwards"),
    [
        (loss((1.0, 1 / (2 * ROWS), False, (ROWS,))), 1),  # by the batch of both ranks
        (loss((1.0, 1 / (2 * ROWS), False, (ROWS, 2))), 1),  # may be by its elements, or by the batch of both ranks
        (loss((1.0, 0.5, True, (ROWS,)), reduction="mean"), 1),  # by the number of ranks
        (loss((1.0, 0.5, True, (ROWS,)), reduction="mean"), 2),  # or of micro-batches
        (loss((0.5, 1.0, True, (ROWS,)), (0.5, 1.0, True, (ROWS,)), reduction="mean"), 1),  # the sum of both terms by the number of ranks
        (loss((1.0, 0.5, True, (ROWS,)), (1.0, 0.5, True, (ROWS,)), reduction="mean"), 1),  # or each
        (loss((0.5, 2.0, True, (ROWS,)), (0.5, 1.0, True, (ROWS,)), reduction="mean"), 1),
        (loss((1.0, 1.0, True, (2 * ROWS,))), 1),  # over what was gathered from both ranks
        (loss((1.0, 1.0, True, (5,)), (1.0, 0.5, True, (ROWS,))), 1),  # of the weights, beside one by the number of ranks
        (loss(OWN, joined=True), 1),
        (loss((1.0, 1 / 32, False, (8, 4)), rows=8), (4, 4, 4, 4, 4, 1)),  # by the batch of all micro-batches, or its elements; the last window is short
        (loss((1.0, 1 / 32, False, (32, 16)), rows=0), 1),  # which is the batch: 32, or 16 on each of two ranks
        (loss((1.0, 0.5, True, (ROWS,)), scaled=False, reduction="mean"), 1),  # each sample by the number of ranks
        (loss((1.0, 1 / 301, False, (ROWS,))), 1),  # by a count of tokens
        (loss(), 1),
        (loss(terms="forged"), 1),
        (loss(terms=[[1.0, "x", True, [3]], [1.0, 1.0, True, []], 7]), 1),
    ],
)
def test_a_factor_that_may_be_the_division_is_left_alone(one: Event, backwards: int) -> None:
    run = run_of(one, backwards)
    assert not bears_no_division(run, one)
    assert findings(GradientSum, run) == []


def in_parts(rank: int, *, alone: bool) -> list[Event]:
    """Parameter 0 is shared and summed; 1 is the rank's own, or one that a single rank's loss reaches."""
    other = {"local": {"1": [1.0]} if not rank else {}, "at_step": {"1": [1.0]}} if alone else {"local": {"1": [1.0 + rank]}, "at_step": {"1": [1.0 + rank]}}
    steps = [
        event("gradients", s=s, opt=0, **{k: {"0": [1.0 + rank, 2.0] if k == "local" else [3.0, 4.0]} | v for k, v in other.items()}) for s in range(3)
    ]
    return [*steps, event("loss", line=30, scaled=False, reduction="mean")]


@pytest.mark.parametrize("alone", [True, False])
def test_a_model_in_parts_may_mean_the_sum(alone: bool) -> None:
    assert findings(GradientSum, two_ranks(ddp=False, extra=lambda rank: in_parts(rank, alone=alone))) == []


@pytest.mark.parametrize(("changed", "num"), [({}, 0), ({"numel": 2}, 1), ({"graded": 1}, 1), ({"op": "broadcast"}, 1), ({"dtype": "int64"}, 1)])
def test_a_forward_that_takes_features_of_other_ranks_means_the_sum(changed: dict[str, Any], num: int) -> None:
    call = {"op": "all_gather", "numel": 256, "dtype": "float32", "grad": False, "world": True, "names": []} | changed
    gathers = [event("coll", line=22, n=s, s=s, **call) for s in range(6)]
    assert len(findings(GradientSum, run_of(loss(scaled=False, reduction="mean"), more=gathers))) == num


def test_without_a_factor_a_mean_is_one() -> None:
    run = run_of(loss())
    assert is_plain(run, loss(scaled=False, reduction="mean")) and not is_plain(run, loss(scaled=False, reduction="sum"))


def test_a_sum_over_a_part_of_each_sample_may_be_meant_to_add_up() -> None:
    by_chunks_of_time = loss((1.0, 1 / ROWS, False, (ROWS, 5)))
    run = run_of(by_chunks_of_time, 3, synced=0.5)
    assert is_plain(run, by_chunks_of_time) and not is_plain(run, by_chunks_of_time, whole=True)
    assert findings(AccumulationUnscaled, run) == []


@pytest.mark.parametrize(("one", "num"), [(loss(OWN), 1), (loss((1.0, 1 / (4 * ROWS), False, (ROWS, CLASSES))), 0), (loss((1.0, 0.25, True, (ROWS,))), 0)])
def test_micro_batches_that_are_means_of_their_own_are_not_divided(one: Event, num: int) -> None:
    assert len(findings(AccumulationUnscaled, run_of(one, 4, synced=0.5))) == num  # averaged by hand: by the ranks alone
    assert findings(AccumulationUnscaled, run_of(one, 4, synced=0.125)) == []  # by the micro-batches as well


def hooked(synced: float, *more: Event, ddp: bool = False) -> Run:
    """The script's own hooks reduce: what is there after the backward is reduced already."""

    def extra(rank: int) -> list[Event]:
        after = {"0": [3.0 * synced, 4.0 * synced]}
        steps = [event("gradients", s=s, opt=0, local=after, at_step=after, hooked={"0": [1.0 + rank, 2.0]}) for s in range(3)]
        call = [event("coll", line=20, op="all_reduce", numel=4, n=s, s=s, dtype="float32", grad=True, inside=True, world=True, names=[]) for s in range(3)]
        return [*steps, *call, *more]

    return two_ranks(ddp=ddp, extra=extra)


MEAN = event("loss", line=30, scaled=False, reduction="mean", rows=ROWS, terms=[])
BY_RANKS = [
    event("whole_divisor", line=30, s=s, kind="ranks", at=SITE, value=2.0, rows=ROWS, given=False, made_up=False) for s in range(6)
]


def test_a_sum_that_hooks_leave_is_found() -> None:
    assert [(f.code, f.where and f.where.line) for f in findings(GradientSum, hooked(1.0, MEAN))] == [("SYN124", 20)]


def test_hooks_that_reduce_nothing_are_no_sum() -> None:
    """One parameter's gradient is doubled by its hook; all are averaged behind the backward."""

    def extra(rank: int) -> list[Event]:
        own = {"0": [2.0 + 2 * rank, 4.0]}
        return [*(event("gradients", s=s, opt=0, local=own, at_step={"0": [3.0, 4.0]}, hooked={"0": [1.0 + rank, 2.0]}) for s in range(3)), MEAN]

    assert findings(GradientSum, two_ranks(ddp=False, extra=extra)) == []


def test_an_average_that_hooks_leave_is_none() -> None:
    assert findings(GradientSum, hooked(0.5, MEAN)) == []


def test_under_ddp_it_is_ddp_that_averages() -> None:
    assert findings(GradientSum, hooked(1.0, MEAN, ddp=True)) == []


@pytest.mark.parametrize(("synced", "num"), [(0.5, 1), (1.0, 0)])
def test_a_loss_by_the_number_of_ranks_is_averaged_again_by_hand(synced: float, num: int) -> None:
    found = findings(AveragedAgain, hooked(synced, *BY_RANKS))
    assert len(found) == num
    assert all("the gradients are averaged over the 2 ranks again" in f.message for f in found)


