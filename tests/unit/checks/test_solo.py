"""Steps that some ranks make for themselves are taken out before the ranks are compared."""

from __future__ import annotations

from builder import event, recording, row

from harness.model import Plan, Scenario
from harness.probe import protocol
from harness.record import Event, Recording, assemble

PLAN = Plan("x", Scenario("x", "train.py"), (), 2)
COMMON, TRIAL = 50, 26  # lines that make an optimizer


def made(opt: int, line: int, s: int) -> Event:
    return event("params", opt=opt, line=line, s=s, names=["weight"])


def common(rank: int, *, first: int = 0, opt: int = 0, before: list[Event] | None = None, rows: list[bytes] | None = None) -> Recording:
    events = [*(before or []), made(opt, COMMON, first), event("reduced", line=60, s=first + 1, at=first + 1), event("end", steps=first + 3)]
    return recording(events, [*(rows or []), *(row(first + n, opt=opt, seq=n) for n in range(3))], rank=rank)


def trial_on_rank_0() -> Recording:
    told = [made(0, TRIAL, 0), event("loss", line=30, s=1), event("pg", s=0, done=True, rank=0, world_size=2)]
    return common(0, first=2, opt=1, before=told, rows=[row(0, opt=0), row(1, opt=0)])


def test_a_trial_on_one_rank_does_not_move_its_steps_against_the_others() -> None:
    run = assemble(PLAN, [trial_on_rank_0(), common(1)])
    first, second = run.present
    assert list(first.column("step")) == list(second.column("step")) == [0, 1, 2]
    assert set(first.column("opt")) == {0} and first.num_steps == second.num_steps == 3
    assert [(e["opt"], e.step) for e in first.of(protocol.PARAMS)] == [(0, 0)]
    assert [(e.step, e["at"]) for e in first.of("reduced")] == [(1, 1)]
    assert not first.of("loss") and first.of("pg")
    assert first in run.processes and [step.complete for step in run.steps()] == [True] * 3


def test_steps_of_optimizers_that_all_ranks_have_stay() -> None:
    both = [common(rank, before=[made(1, TRIAL, 0)], rows=[]) for rank in range(2)]
    assert assemble(PLAN, both).present == both


def test_ranks_with_nothing_in_common_stay_as_they_are() -> None:
    """Stages of a pipeline: each rank's optimizer is made by a line of its own."""
    stages = [recording([made(0, 10 + rank, 0)], [row(0, opt=0)], rank=rank) for rank in range(2)]
    assert [list(r.column("step")) for r in assemble(PLAN, stages).present] == [[0], [0]]
