"""DAT121 and DAT122: permutations that the script draws, the ranks' shares of them, and when they stop being the same."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, site
from replica_runs import two_ranks, wrap_event

from harness.checks.dat.passes_drift import PassesDriftApart
from harness.checks.dat.permutation_parts import SharedPermutationParts
from harness.record import Event, Run

EPOCH = 4  # steps
ROWS = 8


def permuted(s: int, digest: int, *, num: int = 64, generator: bool = False, drawn: list[tuple[int, int]] | None = None, fn: str = "randperm") -> Event:
    told = [[site(line), n] for line, n in drawn or ()]
    return event("permuted", line=61, s=s, fn=fn, num=num, digest=digest, generator=generator, cut=site(62), drawn=told)


def parting(*, equal: int = 1, num: int = 64, epochs: int = 4, seeds: bool = False, reseeded: bool = False, odd: bool = True, generator: bool = False,
            loader: bool = False, starts: int = 0, sampler: bool = False) -> Run:  # fmt: skip
    """Two ranks that draw a permutation each epoch; the first `equal` are the same."""

    def extra(rank: int) -> list[Event]:
        told: list[Event] = [wrap_event(group_size=2), *([event("loader", line=70, distributed={"rank": rank})] if sampler else [])]
        for k in range(epochs):
            digest = 100 + k + (1000 * rank if k >= equal or starts else 0)
            if reseeded and k >= equal:
                digest = 100 + k - rank  # rank 1 has asked once more
            if seeds and k == equal:
                told.append(event("seed", line=5, what="torch", value=rank))
            if loader and k == equal and rank == 0:
                told.append(event("loader", line=80, num_workers=0))
            told.append(permuted(k * EPOCH, digest, num=num, generator=generator, drawn=[(44, k)] if rank == 0 and odd and not loader else []))
        told += [event("accumulation", s=s, rows=ROWS, opt=0) for s in range(6)]
        return told

    return two_ranks(steps=epochs * EPOCH, extra=extra)


@pytest.mark.parametrize(("told", "line"), [
    ({}, 44),  # a preview on rank 0
    ({"loader": True}, 80),  # an evaluation on rank 0: a loader draws a seed
    ({"odd": False}, 61),  # torch drew by itself
    ({"equal": 2}, 44),
    ({"generator": True, "odd": False}, 61),  # a generator that rank 0 drew from once more
    ({"num": 8}, 44),  # a permutation of batches
])  # fmt: skip
def test_a_shared_permutation_that_parts(told: dict[str, Any], line: int) -> None:
    (found,) = findings(SharedPermutationParts, parting(**told))
    assert found.where is not None and found.where.line == line
    assert "same on all ranks at first" in found.message


@pytest.mark.parametrize("told", [
    {"starts": 1},  # seeds of their own from the start
    {"equal": 4},  # never parts
    {"seeds": True},  # seeded apart on purpose, after the split
    {"num": 32},  # each rank trains on all of it: mixup, or its own order
    {"sampler": True},  # a DistributedSampler deals the data out, this one picks what is looked at
    {"num": 500},  # a sample of a replay buffer
    {"reseeded": True},  # one rank asked once more for permutations that are seeded by epoch
    {"generator": True, "reseeded": True},
])  # fmt: skip
def test_other_permutations_are_not_judged(told: dict[str, Any]) -> None:
    assert findings(SharedPermutationParts, parting(**told)) == []


def drifting(passes: tuple[int, int], *, num: int = 50, alike: bool = True, calls: int = 4, same: bool = False, join: bool = False) -> Run:
    def extra(rank: int) -> list[Event]:
        told: list[Event] = [wrap_event(group_size=2), *([event("join")] if join else [])]
        told += [permuted(k * passes[rank], 7 if same else k + 1 + (0 if alike else 100 * rank), num=num, generator=True) for k in range(calls)]
        return [*told, *[event("accumulation", s=s, rows=ROWS, opt=0) for s in range(6)]]

    return two_ranks(steps=14, extra=extra)


@pytest.mark.parametrize(("passes", "told", "fires"), [
    ((4, 3), {}, True),
    ((3, 3), {}, False),
    ((4, 3), {"alike": False}, False),  # each its own order
    ((4, 3), {"same": True}, False),  # the same split over and over
    ((4, 3), {"num": 28}, False),  # each trains on all of it
    ((4, 3), {"join": True}, False),
    ((4, 3), {"calls": 2}, False),
])  # fmt: skip
def test_passes_that_drift_apart(passes: tuple[int, int], told: dict[str, Any], fires: bool) -> None:
    found = findings(PassesDriftApart, drifting(passes, **told))
    assert len(found) == fires
    if fires:
        assert found[0].where is not None and found[0].where.line == 62
        assert "4 steps on rank 0, 3 steps on rank 1" in found[0].message


def test_a_permutation_of_numpy_or_of_a_list_is_read() -> None:
    np = pytest.importorskip("numpy")
    from harness.probe.sensors import permutations

    assert permutations._digest(np.arange(96)) == permutations._digest(list(range(96))) != permutations._digest(list(range(95, -1, -1)))
