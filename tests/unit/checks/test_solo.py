"""Steps that some ranks make for themselves are taken out before the ranks are compared."""

from __future__ import annotations

from builder import event, findings, recording, row

from harness.assembly import assemble
from harness.checks.base import Check
from harness.checks.registry import all_checks
from harness.model import Plan, Scenario, Severity
from harness.probe import protocol
from harness.record import Event, Recording

PLAN = Plan("x", Scenario("x", "train.py"), (), 2)
CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}
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


def searched(rank: int, alone: int, *, lr: float = 0.1, epoch: bool = True) -> Recording:
    """Two members a rank, `alone` steps in all, before DDP wraps; then 40 steps of what it wraps."""
    first, wrapped = alone // 2, alone
    passes = [event("loader", s=0, line=30, loop=0), event("pass", s=first, line=30, loop=0, steps=first, backwards=first)] if epoch else []
    measured = [event("loader", s=wrapped, line=31, loop=1), event("pass", s=wrapped, line=31, loop=1, steps=0, backwards=0)]
    wrap = [event("wrapping", s=wrapped, line=40, each=[1]), event("wrap", s=wrapped, line=40, names=["weight"], each=[1])]
    then = [event("loader", s=wrapped, line=50, loop=2), event("pass", s=wrapped + 40, line=50, loop=2, steps=40, backwards=40)]
    told = [event("pg", done=True, rank=rank, world_size=2), *passes, *measured, *wrap, *then, event("scheduler", s=wrapped, line=60)]
    told += [event("params", s=wrapped, opt=2, line=COMMON, names=["weight"], numels=[4], ddp=[0])]
    rows = [row(s, opt=s >= first, param=9) for s in range(wrapped)]
    for n in range(40):
        seen = protocol.witnessed(wrapped + n)
        digests = {"param": 100 + n, "hyper": n + 1, "grad": 7, "full": wrapped + n} if seen else {}
        rows.append(row(wrapped + n, opt=2, num_reduce=1, flags=protocol.FLAG_DDP, lr=lr * (1 - n / 40), **digests))
    return recording(told, [r for s, r in enumerate(rows) if protocol.kept(s)], rank=rank, world_size=2)


def test_a_digest_that_only_some_ranks_took_at_a_step_is_compared_at_none() -> None:
    """272 and 310 steps of their own: none of those that follow was looked at on both ranks."""
    run = assemble(PLAN, [searched(0, 272), searched(1, 310)])
    steps = list(run.steps())
    assert [s.index for s in steps] == list(range(40)) and all(s.complete and s.same("hyper") and s.same("full") for s in steps)
    assert not findings(CHECKS["OPT103"], run)
    run = assemble(PLAN, [searched(0, 272), searched(1, 304)])
    assert [s.index for s in run.steps() if s.taken("param")] == [0, 16, 32] and not findings(CHECKS["OPT103"], run)


def test_rates_that_part_where_no_digest_could_be_compared_are_a_warning() -> None:
    run = assemble(PLAN, [searched(0, 272), searched(1, 310, lr=0.2)])
    assert [f.severity for f in findings(CHECKS["OPT103"], run)] == [Severity.WARNING]


def test_steps_of_a_long_search_are_counted_by_the_wrap() -> None:
    """From the 1,024th step on most leave no row."""
    run = assemble(PLAN, [searched(0, 1200, epoch=False), searched(1, 1400, epoch=False)])
    assert all(set(r.column("step")) <= set(range(40)) for r in run.present) and not findings(CHECKS["OPT103"], run)


def test_passes_of_dropped_steps_and_measurements_before_the_wrap_are_dropped() -> None:
    run = assemble(PLAN, [searched(0, 20), searched(1, 30)])
    assert [[(e["loop"], e.step) for e in r.of("loader")] for r in run.present] == [[(2, 0)], [(2, 0)]]
    assert [[(e["loop"], e.step) for e in r.of("pass")] for r in run.present] == [[(2, 40)], [(2, 40)]]
