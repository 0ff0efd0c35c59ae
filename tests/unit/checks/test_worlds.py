"""Which processes are one training world, where a script makes several one after the other; and that each fault of theirs is told once."""

from __future__ import annotations

from builder import event, recording, row, run

from harness import worlds
from harness.model import Finding, Outcome, OutcomeKind, Severity, Where
from harness.record import Recording


def member(rank: int, size: int, begins: int, ends: int, *, pid: int, steps: int = 3, role: str = "child") -> Recording:
    events = [event("pg", t=begins, done=True, rank=rank, world_size=size), event("pg_destroy", t=ends), event("end", t=ends + 1, steps=steps)]
    return recording(events, [row(s) for s in range(steps)], rank=rank, pid=pid, role=role)


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


def told(*findings: Finding, kind: OutcomeKind = OutcomeKind.RAN) -> tuple[list[Outcome], list[Finding]]:
    return [Outcome("SYN101", "a", kind)], list(findings)


def test_a_fault_is_told_once_and_of_which_world() -> None:
    here, there = (Finding("SYN101", "a", Severity.ERROR, f"{n} steps", Where("t.py", 3)) for n in (5, 7))
    other = Finding("DAT101", "b", Severity.ERROR, "m", Where("t.py", 9))
    outcomes, found = worlds.merged([told(here, kind=OutcomeKind.INCONCLUSIVE), told(there, other)])
    assert [(f.code, f.message) for f in found] == [("DAT101", "m"), ("SYN101", "5 steps")]
    assert found[0].notes == ("in another of the 2 process groups that the script makes one after the other",) and not found[1].notes
    assert [o.kind for o in outcomes] == [OutcomeKind.RAN]
