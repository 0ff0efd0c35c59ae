"""Which processes are one training world, where a script makes several one after the other; and that each fault of theirs is told once."""

from __future__ import annotations

import pytest
from builder import event, findings, recording, row, run

from harness import worlds
from harness.checks.lau import blame
from harness.checks.lau.rank_failed import RankFailed
from harness.model import Ending, Finding, Outcome, OutcomeKind, RankExit, Severity, Where
from harness.record import Recording
from harness.report import failure


def member(rank: int, size: int, begins: int, ends: int, *, pid: int, steps: int = 3, role: str = "child") -> Recording:
    events = [event("pg", t=begins, done=True, rank=rank, world_size=size), event("pg_destroy", t=ends), event("end", t=ends + 1, steps=steps)]
    return recording(events, [row(s, t_ns=begins) for s in range(steps)], rank=rank, pid=pid, role=role)


PARENT = recording(pid=1)


def pids(of: list[Recording]) -> list[int]:
    return [r.pid for r in of]


def test_a_second_session_is_a_world_of_its_own() -> None:
    made = [member(r, 2, 100 + 900 * s, 500 + 900 * s, pid=90 + 10 * s + r, steps=3 + s) for s in range(2) for r in range(2)]
    whole = run([PARENT, *sorted(made, key=lambda m: str(m.pid))])  # as the files are read: 100 before 90
    assert pids(whole.present) == [100, 101] and [pids(o.present) for o in whole.others] == [[90, 91]]
    assert pids(whole.others[0].processes) == [1, 90, 91] and len(whole.processes) == 5


def test_a_baseline_of_one_rank_is_no_rank_of_the_job() -> None:
    whole = run([PARENT, member(0, 1, 100, 200, pid=50, steps=9), member(0, 2, 300, 400, pid=60), member(1, 2, 300, 400, pid=61)])
    assert pids(whole.present) == [60, 61] and whole.others == []


def test_a_launched_process_that_was_alone_before_it_spawned_is_none_either() -> None:
    alone = member(0, 1, 100, 200, pid=1, role="main")
    assert pids(run([alone, member(0, 2, 300, 400, pid=60), member(1, 2, 300, 400, pid=61)]).present) == [60, 61]


def test_worlds_side_by_side_cannot_be_told_apart() -> None:
    made = [member(r, 2, 100 + w, 500, pid=60 + 2 * w + r) for w in range(2) for r in range(2)]
    whole = run([PARENT, *made])
    assert pids(whole.present) == [60, 61] and whole.others == []


def test_ranks_that_were_told_one_number_stay_what_the_launcher_started() -> None:
    whole = run([member(0, 1, 100, 500, pid=60 + r, role="main") if r == 0 else recording(rank=1, pid=61) for r in range(2)])
    assert pids(whole.present) == [60, 61]


def test_a_rank_that_was_alone_in_a_broken_session_does_not_take_part_in_the_next() -> None:
    """Rank 1 of the first died before it joined; of the second rank 1 is there first."""
    made = [member(0, 2, 100, 200, pid=50), begun(member(1, 2, 400, 500, pid=61), 300), begun(member(0, 2, 401, 500, pid=60), 300)]
    whole = run([PARENT, *made])
    assert pids(whole.present) == [60, 61] and [pids(o.present) for o in whole.others] == [[50]]


def begun(of: Recording, at: int) -> Recording:
    of.events[0] = event("start", **{**of.events[0].data, "t": at})
    return of


def test_a_process_that_goes_on_in_a_smaller_group_stays_with_those_that_left() -> None:
    made = [member(r, 4, 100, 200, pid=60 + r) for r in range(4)]
    for rank in range(2):
        made[rank].events[-1:-1] = [event("pg", t=300, done=True, rank=rank, world_size=2), event("pg_destroy", t=400)]
    whole = run([PARENT, *made])
    assert pids(whole.present) == [60, 61, 62, 63] and whole.others == []


def test_the_world_that_trained_longest_stands_for_the_run_not_the_widest() -> None:
    made = [member(r, 4, 100, 200, pid=50 + r, steps=1) for r in range(4)] + [member(r, 2, 300, 400, pid=60 + r, steps=9) for r in range(2)]
    whole = run([PARENT, *made])
    assert pids(whole.present) == [60, 61] and [o.world_size for o in whole.others] == [4]


def test_what_the_launcher_started_stands_for_the_run_whatever_it_starts_itself() -> None:
    made = [member(r, 2, 100, 900, pid=50 + r, role="main") for r in range(2)] + [member(r, 4, 300, 400, pid=60 + r, steps=9) for r in range(4)]
    whole = run(made)
    assert pids(whole.present) == [50, 51] and [o.world_size for o in whole.others] == [4]


def test_one_that_still_trains_is_not_behind_another_because_it_told_nothing_lately() -> None:
    made = [member(r, 2, 100 + 1500 * w, 0, pid=60 + 2 * w + r) for w in range(2) for r in range(2)]
    for one in made:
        del one.events[2:]
        one.rows = row(0, t_ns=5000)
    assert run([PARENT, *made], live=True).others == []


def fallen(of: Recording, at: int) -> Recording:
    of.events[2:] = [event("failure", t=at, line=7, type="ValueError", message="broken", op="")]
    return of


@pytest.mark.parametrize("broken", [0, 1])
def test_a_session_that_fails_is_told_of_its_own_rank(broken: int) -> None:
    """The other one trained longer, so that it stands for the run; the script ends with it, or goes on behind it."""
    made = [member(r, 2, 100 + 900 * s, 500 + 900 * s, pid=60 + 2 * s + r, steps=3 if s == broken else 9) for s in range(2) for r in range(2)]
    fallen(made[2 * broken + 1], 400 + 900 * broken)
    whole = run([PARENT, *made])
    for one in (whole, *whole.others):
        one.ending = Ending(exits=(RankExit(0, 1, broken, 9999),))
    judged = worlds.judged(whole)
    assert [[f.ranks for f in findings(RankFailed, one)] for one in judged] == [[], [(1,)]]
    assert [one.finished for one in judged] == ([True, False] if broken else [True, True])
    assert whole.ending.exits[0].code == broken
    failed = failure.first_failure(whole, [f for one in judged for f in findings(RankFailed, one)])
    assert failed is not None and failed[0] == 1
    assert [fall.rank for fall in blame.falls(judged[1])] == [1]  # the exit code is that of the parent


def test_a_search_of_many_trials_is_judged_in_part_the_last_of_them_always() -> None:
    made = [member(r, 2, 100 + 900 * s, 500 + 900 * s, pid=60 + 2 * s + r, steps=40 - s) for s in range(20) for r in range(2)]
    whole = run([PARENT, *made])
    assert (len(whole.others), whole.num_unjudged) == (worlds.MAX_WORLDS - 1, 4)
    assert [one.over for one in (whole, *whole.others)] == [True] * 15 + [False] and pids(whole.others[-1].present) == [98, 99]


def told(*findings: Finding, kind: OutcomeKind = OutcomeKind.RAN) -> tuple[list[Outcome], list[Finding]]:
    return [Outcome("SYN101", "a", kind)], list(findings)


def test_a_fault_is_told_once_and_of_which_world() -> None:
    here, there = (Finding("SYN101", "a", Severity.ERROR, f"{n} steps", Where("t.py", 3)) for n in (5, 7))
    other = Finding("DAT101", "b", Severity.ERROR, "m", Where("t.py", 9))
    outcomes, found = worlds.merged([told(here, kind=OutcomeKind.INCONCLUSIVE), told(there, other)])
    assert [(f.code, f.message) for f in found] == [("DAT101", "m"), ("SYN101", "5 steps")]
    assert found[0].notes == ("in another of the 2 process groups that the script makes one after the other",) and not found[1].notes
    assert [o.kind for o in outcomes] == [OutcomeKind.RAN]


def test_a_fault_is_told_where_it_is_worst() -> None:
    here, there = (Finding("SYN101", "a", s, "m", Where("t.py", 3)) for s in (Severity.ADVICE, Severity.ERROR))
    assert [f.severity for f in worlds.merged([told(here), told(there)])[1]] == [Severity.ERROR]
    assert worlds.merged([told(there), told(here)])[1] == [there]
