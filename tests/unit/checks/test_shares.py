"""OPT132 and EVL107: a loss that is a share of the mean over all ranks, averaged once more by DDP, and the healthy runs that come near."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, site
from replica_runs import two_ranks

from harness.checks.opt.averaged_again import AveragedAgain
from harness.checks.opt.shares import of
from harness.record import Event, Run

VARYING = [(5, 7), (6, 8), (9, 4), (5, 5), (8, 8), (6, 3)]
CONSTANT = [(16, 16)] * 6


def counted(
    counts: list[tuple[int, int]] = VARYING,
    *,
    scale: float = 1.0,
    after: float = 1.0,
    rows: int = 16,
    predivided: bool = False,
    backward: dict[str, Any] | None = None,
    more: list[Event] | None = None,
    weight: float = 0.5,
    ddp: bool = True,
    **quotient: Any,
) -> Run:
    """Losses divided by `scale` times what the ranks summed up; a pair of counts a step."""

    def told(rank: int) -> list[Event]:
        events = [event("summed", line=36, predivided=predivided)]
        for s, pair in enumerate(counts):
            total = float(sum(pair)) * after
            events.append(event("reduced", line=36, s=s, op="all_reduce", reduce="sum", before=[float(pair[rank])], after=[total], rows=rows, at=s, at_t=s))
            bare = {"value": scale * total, "same": False, "above": [], "below": [], "mean": False} | quotient
            events.append(event("share", line=41, s=s, **({"made": site(40), "quotients": [bare], "given": False, "made_up": False} | (backward or {}))))
        for s in range(0 if ddp else 3):
            events.append(event("gradients", opt=0, s=s, local={"0": [1.0 + rank]}, synced={"0": [3.0 * weight]}, at_step={"0": [3.0 * weight]}))
        return events + (more or [])

    return two_ranks(ddp=ddp, extra=told)


def scaled_by_hand(factor: float) -> list[Event]:
    return [event("gradients", opt=0, s=s, local={"0": [1.0]}, synced={"0": [factor]}, at_step={"0": [factor]}) for s in range(3)]


@pytest.mark.parametrize(
    "faulty",
    [
        counted(),
        counted(above=[1.0]),
        counted(CONSTANT, same=True),  # that very tensor, and it counts the batch
        counted(ddp=False),  # averaged by hand
        counted(below=[0.125]),  # of the model's own
    ],
)
def test_the_mean_is_taken_twice(faulty: Run) -> None:
    (found,) = findings(AveragedAgain, faulty)
    assert found.where is not None and found.where.line == 36 and "1/2" in found.message


HEALTHY = {
    "count divided by the ranks": counted(scale=0.5),
    "loss times the ranks": counted(above=[2.0]),
    "times the ranks before it is divided": counted(below=[2.0]),
    "a weight that may hold the ranks": counted(above=[0.25]),
    "gradients summed by hand": counted(ddp=False, weight=1.0),
    "a hook that may sum": counted(more=[event("comm_hook", name="summed", module="__main__")]),
    "gradients scaled by hand": counted(more=scaled_by_hand(2.0)),
    "scaled behind the clip": counted(
        more=[event("gradients", opt=0, s=s, local={"0": [1.0]}, synced={"0": [1.0]}, at_step={"0": [1.5]}) for s in range(3)]
    ),
    "a batch size that is another count's equal": counted(CONSTANT),
    "counts of no batch": counted(CONSTANT, rows=8, same=True),
    "divided before the sum": counted(predivided=True),
    "halves add up": counted([(2, 3)] * 3, after=0.5),
    "counts of one rank": counted([(n, 0) for n in range(4, 10)]),
    "a mean": counted(mean=True),
    "backward with a gradient": counted(backward={"given": True}),
    "a larger learning rate": counted(backward={"made_up": True}),
    "a collective with a gradient": counted(backward={"quotients": None}),
    "two steps": counted(VARYING[:2]),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_comes_near(name: str) -> None:
    assert findings(AveragedAgain, HEALTHY[name]) == []


def test_one_backward_without_the_count() -> None:
    odd = counted(more=[event("share", line=41, s=7, made=site(40), quotients=[], given=False, made_up=False)])
    assert of(odd) == [] and findings(AveragedAgain, odd) == []


def test_shares_for_other_checks() -> None:
    assert [s.certain for s in of(counted(CONSTANT))] == [False]  # enough to say nothing, not to say something
    assert of(counted(above=[2.0])) == [] and of(two_ranks()) == []


def unseen(sides: list[str], *, backwards: int = 1, weight: float = 0.5, ddp: bool = True, more: list[Event] | None = None, **fields: Any) -> Run:
    """Losses that were reduced in place, an entry a backward."""

    def told(rank: int) -> list[Event]:
        fixed = {"made": site(30), "at": site(31), "given": False, "made_up": False} | fields
        events = [event("unseen_sum", line=33, s=s, side=side, **fixed) for s, side in enumerate(sides)]
        for s in range(0 if ddp else 3):
            events.append(event("gradients", opt=0, s=s, local={"0": [1.0 + rank]}, synced={"0": [3.0 * weight]}, at_step={"0": [3.0 * weight]}))
        return events + (more or [])

    return two_ranks(ddp=ddp, extra=told, each=lambda r, s: {"num_backward": backwards})


@pytest.mark.parametrize("faulty", [unseen(["after"] * 6), unseen(["before"] * 6), unseen(["before"] * 6, ddp=False)])
def test_the_sum_that_autograd_does_not_see(faulty: Run) -> None:
    (found,) = findings(AveragedAgain, faulty)
    assert found.where is not None and found.where.line == 31 and "in place" in found.message


@pytest.mark.parametrize(
    "healthy",
    [
        unseen([""] * 6),  # no division by the number of ranks, or another part of the loss
        unseen(["after"] * 5 + [""]),
        unseen(["after"] * 3),
        unseen(["after"] * 6, backwards=2),  # the micro-batches' quotient
        unseen(["after"] * 6, ddp=False, weight=1.0),  # gradients are summed by hand
        unseen(["after"] * 6, given=True),
        unseen(["after"] * 6, made_up=True),
        unseen(["after"] * 6, more=[event("comm_hook", name="summed", module="__main__")]),
        unseen(["after"] * 6, more=scaled_by_hand(2.0)),
    ],
)
def test_sums_in_place_that_are_right(healthy: Run) -> None:
    assert findings(AveragedAgain, healthy) == []


# ---- the whole of the loss, by the number of ranks or by the batch of all ranks ----
def whole(
    kind: str = "ranks", *, value: float = 2.0, rows: tuple[int, ...] = (8,) * 6, ddp: bool = True, more: list[Event] | None = None, backwards: int = 1, hops: int = 1, **told: Any
) -> Run:
    def told_by(rank: int) -> list[Event]:
        bare = {"kind": kind, "at": site(20), "given": False, "made_up": False}
        own = [bare | {"value": value if n == rows[0] else 0.0, "rows": n} | told for n in rows]
        return [*(event("whole_divisor", line=41, s=s // hops, **one) for s, one in enumerate(own)), *(more or [])]

    return two_ranks(extra=told_by, ddp=ddp, each=lambda rank, step: {"num_backward": backwards})


def test_the_whole_loss_is_divided() -> None:
    (found,) = findings(AveragedAgain, whole())
    assert (found.code, found.where and found.where.line, found.ranks) == ("OPT132", 20, (0, 1))
    (found,) = findings(AveragedAgain, whole("batch", value=16.0, rows=(8, 8, 8, 8, 8, 3)))  # the last batch is short
    assert "the batch of all ranks (16)" in found.message
    assert findings(AveragedAgain, whole(rows=(8,) * 12, backwards=3, hops=3))  # three micro-batches on two ranks


@pytest.mark.parametrize(
    "near",
    [
        {"value": 0.0},  # the graph has no such quotient, or a factor beside it
        {"made_up": True},  # the learning rate is multiplied by the number of ranks
        {"given": True},  # backward is handed a factor
        {"rows": (8, 8, 8)},  # too few to tell
        {"rows": (8, 8, 8, 8, 8, 3)},  # now and then
        {"ddp": False},  # gradients summed by hand
        {"more": [event("comm_hook", name="summed", module="__main__")]},  # or by a hook
        {"more": scaled_by_hand(2.0)},
        {"backwards": 2},  # the mean over as many micro-batches
        {"backwards": 3, "hops": 2},  # and a penalty's backward beside them
        {"kind": "batch", "value": 16.0, "backwards": 2, "hops": 2},
    ],
)
def test_a_loss_that_is_made_up_for(near: dict[str, Any]) -> None:
    assert findings(AveragedAgain, whole(**near)) == []


def test_an_overflow_that_is_reduced_is_no_count() -> None:
    inf = float("inf")
    overflow = event("reduced", line=20, op="all_reduce", reduce="sum", before=[1.0], after=[inf], rows=16, at=0, at_t=0)
    assert of(counted(more=[overflow])) == of(counted()) != []
