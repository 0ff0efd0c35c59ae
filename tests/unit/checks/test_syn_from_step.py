"""SYN130 and SYN128 where the ranks train together at first: gradients that are lost on the way, and what a broadcast says of a split model."""

from __future__ import annotations

import pytest
from builder import event, findings, recording, row, run
from replica_runs import details, setup
from test_syn_kinds import coll

from harness.checks.syn.no_effect import SyncHasNoEffect
from harness.checks.syn.partly import PartlySynced
from harness.model import Severity
from harness.probe import protocol
from harness.record import Event, Run

STEPS = 24


def _value(step: int, place: int, apart: int, lost: tuple[int, ...]) -> int:
    return 90 + step + place + 1000 * apart * (place in lost)


def _behind(step: int, apart: int, lost: tuple[int, ...]) -> int:
    return protocol.digest_of([_value(step, i, apart, lost) for i in range(4)])


def parted(since: int, until: int = STEPS, *, lost: tuple[int, ...] = (0, 1, 2, 3), calls: tuple[int, ...] = (32, 8), averaged: tuple[int, ...] = ()) -> Run:
    """Two ranks whose gradients at the positions `lost` differ in the steps since .. until, while all of them are reduced in `calls`, in parcels."""
    made = []
    for r in (0, 1):
        own = [r * (since <= s < until) for s in range(STEPS)]
        stay = [r * (s >= since) for s in range(STEPS)]
        told: list[Event] = [*setup(r, ddp=False)]
        told += [coll("all_reduce", 58, s=s, numel=n, graded=True, n=s) for s in range(STEPS) for n in calls]
        told += [event("before", s=s, opt=0, digest=7 if s in averaged else _behind(s - 1, s > 0 and stay[s - 1], lost)) for s in range(STEPS)]
        rows = [row(s, grad=9 + s + 100 * own[s], param=50 + s + 100 * stay[s], num_coll=len(calls)) for s in range(STEPS)]
        one = recording(told, rows, rank=r, world_size=2)
        one.params = details(
            STEPS, lambda s, i, own=own: 50 + s + i + 1000 * own[s] * (i in lost), lambda s, i, stay=stay: _value(s, i, stay[s], lost)
        )
        made.append(one)
    return run(made)


@pytest.mark.parametrize("since", [1, 8])
def test_gradients_that_agree_up_to_some_step_were_lost_on_the_way(since: int) -> None:
    (found,) = findings(SyncHasNoEffect, parted(since))
    assert found.severity is Severity.ERROR and found.where is not None and found.where.line == 58
    assert f"agree up to step {since - 1} " in found.message
    assert findings(PartlySynced, parted(since)) == []


@pytest.mark.parametrize("told", [
    parted(STEPS - 2),  # the end of a run
    parted(4, 20),  # they agree again
    parted(8, calls=(16,)),  # what is reduced is too little
    parted(8, calls=(32, 32)),  # or something else
    parted(8, averaged=(12, 16, 20)),  # local steps, and averages of the parameters
    parted(8, lost=(0, 1)),  # some go on agreeing
])  # fmt: skip
def test_a_parting_that_says_nothing_of_a_lost_gradient(told: Run) -> None:
    assert findings(SyncHasNoEffect, told) == []


def test_parcels_that_change_nothing_from_the_first_step_on() -> None:
    (found,) = findings(SyncHasNoEffect, parted(0))
    assert "not written back" in found.message


def test_some_gradients_that_differ_from_a_step_on() -> None:
    (found,) = findings(PartlySynced, parted(8, lost=(2, 3)))
    assert "of 2 parameters are not synchronised from step 8 on, those of 2 others are: 1.bias, 1.weight" in found.message
    assert findings(PartlySynced, parted(8, 20, lost=(2, 3))) == []
    assert findings(PartlySynced, parted(8, lost=(2, 3), averaged=(12, 16, 20))) == []


def split(*sent: int, forward: str = "all_gather") -> Run:
    """Half of the parameters are left out, and the backward of what `forward` did scatters an activation; `sent`: sizes that were broadcast at first."""
    made = []
    for r in (0, 1):
        told = [*setup(r, ddp=False), *(coll("broadcast", 69, s=0, numel=n) for n in sent)]
        for s in range(6):
            told += [coll(forward, 34, s=s, numel=1536, graphed=True), coll("scatter", 82, s=s, numel=1536, inside=True), coll("all_reduce", 56, s=s, numel=20)]
        one = recording(told, [row(s, grad=9 + s + 100 * r, param=50 + s + 100 * r, num_coll=3) for s in range(6)], rank=r, world_size=2)
        one.params = details(6, lambda s, i, r=r: 50 + s + i + 1000 * r * (i > 1), lambda s, i, r=r: 90 + s + i + 1000 * r * (i > 1))
        made.append(one)
    return run(made)


@pytest.mark.parametrize(("told", "severity"), [
    (split(4, 16, 4, 16), Severity.WARNING),
    (split(40), Severity.WARNING),  # all in one
    (split(), Severity.ADVICE),  # equal by the seed: experts may be
    (split(4, 16), Severity.ADVICE),  # the half that all ranks share
    (split(4, 16, 4, 16, forward="all_reduce"), Severity.ADVICE),  # halves of a layer add up
])  # fmt: skip
def test_what_was_broadcast_is_no_slice_of_a_split_model(told: Run, severity: Severity) -> None:
    (found,) = findings(PartlySynced, told)
    assert found.severity is severity
