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


def parted(since: int, until: int = STEPS, *, lost: tuple[int, ...] = (0, 1, 2, 3), calls: tuple[int, ...] = (32, 8), averaged: tuple[int, ...] = (),
    later: tuple[int, ...] | None = None, stale: bool | None = True, ending: tuple[int, ...] = (), before: bool = True,
) -> Run:  # fmt: skip
    """Two ranks whose gradients at the positions `lost` differ in the steps since .. until, while all of them are reduced in `calls`, in parcels.
    `later`: what is reduced from `since` on; stale: all ranks then put in the same (None: nobody told); ending: sizes that are averaged behind the last
    step; before: there were gradients at `lost` up to then."""
    made = []
    for r in (0, 1):
        own = [r * (since <= s < until) for s in range(STEPS)]
        stay = [r * (s >= since) for s in range(STEPS)]
        told: list[Event] = [*setup(r, ddp=False)]
        for s in range(STEPS):
            content = {} if stale is None else {"sent": 1 if stale and s >= since else 2 + r}
            told += [coll("all_reduce", 58, s=s, numel=n, graded=True, n=s, **content) for n in (calls if s < since or later is None else later)]
        told += [coll("all_reduce", 70, s=STEPS, numel=n, n=STEPS) for n in ending]
        told += [event("before", s=s, opt=0, digest=7 if s in averaged else _behind(s - 1, s > 0 and stay[s - 1], lost)) for s in range(STEPS)]
        rows = [row(s, grad=9 + s + 100 * own[s], param=50 + s + 100 * stay[s], num_coll=len(calls)) for s in range(STEPS)]
        one = recording(told, rows, rank=r, world_size=2)
        one.params = details(
            STEPS,
            lambda s, i, own=own: (before or s >= since or i not in lost) * (50 + s + i + 1000 * own[s] * (i in lost)),
            lambda s, i, stay=stay: _value(s, i, stay[s], lost),
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


def test_reductions_that_carry_the_ranks_own_gradients_leave_it_open_whether_they_were_lost() -> None:
    for told in (parted(8, stale=False), parted(8, stale=None), parted(8, stale=False, ending=(4, 16))):
        (found,) = findings(SyncHasNoEffect, told)
        assert found.severity is Severity.WARNING and "does not come back" in found.message


def test_members_of_their_own_are_averaged_at_the_end() -> None:
    assert findings(SyncHasNoEffect, parted(8, stale=False, ending=(4, 16, 4, 16))) == []
    assert findings(SyncHasNoEffect, parted(8, stale=False, ending=(40,))) == []
    (found,) = findings(SyncHasNoEffect, parted(8, ending=(40,)))  # what goes in was reduced before: lost all the same
    assert found.severity is Severity.ERROR


@pytest.mark.parametrize(("told", "severity"), [
    (parted(8, lost=(2, 3), calls=(4, 16, 4, 16)), Severity.ERROR),
    (parted(8, lost=(2, 3), calls=(4, 16, 4, 16), later=(4, 16)), Severity.ADVICE),  # heads of their own, from some epoch on
    (parted(8, lost=(2, 3), calls=(40,), later=(20,)), Severity.ADVICE),
    (parted(8, lost=(2, 3), calls=(40,), stale=False), Severity.WARNING),  # or the same, in one tensor whose end is not written back
    (parted(8, lost=(2, 3), calls=(4, 16), stale=False, before=False), Severity.ERROR),  # unfrozen later, and never reduced
])  # fmt: skip
def test_reductions_that_stop_were_chosen_to(told: Run, severity: Severity) -> None:
    (found,) = findings(PartlySynced, told)
    assert found.severity is severity


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
