"""Who fell, where, and by whose hand: exits without an exception, signals and their senders, a dead launcher, a deleted folder."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest
from builder import event, recording, run

from harness.checks.engine import judge
from harness.model import Ending
from harness.record import Run
from harness.report.failure import failure_lines


def codes(found: Any) -> list[str]:
    return [f.code for f in found]


def with_ending(made: Run, **changes: Any) -> Run:
    made.ending = replace(made.ending, **changes)
    return made


# ---- exits


@pytest.mark.parametrize(("code", "status", "line"), [(3, 3, 7), (1, "no such data", 7), (255, -1, 7), (3, 4, None), (2, "text", None)])
def test_the_line_of_an_exit_is_that_of_the_call_that_gives_this_code(code: int, status: Any, line: int | None) -> None:
    made = run([recording([event("exit_call", code=status, how="sys.exit", line=7)])], exits=(code,))
    _, found = judge(made, select=("LAU101",))
    assert codes(found) == ["LAU101"]
    assert (found[0].where.line if found[0].where else None) == line


def test_of_ranks_that_leave_by_one_statement_the_one_with_a_reason_is_named() -> None:
    """`sys.exit(text if rank == 0 else 1)`, where rank 1 was quicker."""
    said, silent = (event("exit_call", code=code, how="sys.exit", line=7) for code in ("train: a.jpg does not decode", 1))
    made = run([recording([said], rank=0), recording([silent], rank=1)], exits=(1, 1), logs={0: "train: a.jpg does not decode\n"})
    exits = [replace(e, time_ns=9 - e.rank) for e in made.ending.exits]
    _, found = judge(with_ending(made, exits=tuple(exits)), select=("LAU101",))
    assert found[0].ranks == (0,) and found[0].message.endswith("its last line is: train: a.jpg does not decode")
    assert failure_lines(made, found) == ["rank 0 ended with exit code 1; the end of its output:", "  | train: a.jpg does not decode"]
    elsewhere = run([recording([event("exit_call", code="peer is lost", how="sys.exit", line=9)], rank=0), recording([silent], rank=1)], exits=(1, 1))
    _, found = judge(with_ending(elsewhere, exits=tuple(exits)), select=("LAU101",))
    assert found[0].ranks == (1,)  # who left first, by a statement of its own


def test_an_exit_of_one_rank_is_no_parting_of_loops() -> None:
    from harness.checks.dat import parting

    ranks = [recording([event("exit_call", code=3, how="os._exit", line=9)], rank=0), recording(rank=1)]
    made = run(ranks, exits=(3, -15))
    assert parting._failed_before_the_others(made, 0) and not parting._failed_before_the_others(made, 1)


def test_a_loader_worker_that_dies_while_it_sends_makes_no_victim() -> None:
    """recv of a tensor from it says "connection reset by peer", as gloo does for a peer rank."""
    reset = event("failure", line=5, type="ConnectionResetError", message="[Errno 104] Connection reset by peer", op="data")
    made = run([recording(rank=0), recording([reset], rank=1)], exits=(-15, 1))
    _, found = judge(made, select=("LAU101", "HNG"))
    assert codes(found) == ["LAU101"] and found[0].ranks == (1,) and found[0].message.startswith("rank 1 failed with ConnectionResetError")


# ---- signals


def killed(code: int, *more: Any, pid: int = 1001) -> Run:
    return run([recording(more, rank=0), recording(rank=1)], exits=(-signal.SIGTERM, code))


def test_the_line_that_sent_the_signal_is_shown() -> None:
    made = killed(-signal.SIGKILL)
    pid = made.ending.exits[1].pid
    call = event("kill_call", t=1, pid=pid, signal=int(signal.SIGKILL), line=12)
    made = run([recording([call], rank=0), recording(rank=1)], exits=(0, -signal.SIGKILL))
    _, found = judge(made, select=("LAU102",))
    assert codes(found) == ["LAU102"] and found[0].where is not None and found[0].where.line == 12
    assert "rank 0 sent it" in found[0].notes
    other = event("kill_call", t=1, pid=pid + 1, signal=int(signal.SIGKILL), line=12)
    _, silent = judge(run([recording([other], rank=0), recording(rank=1)], exits=(0, -signal.SIGKILL)), select=("LAU102",))
    assert silent[0].where is None and not any("sent it" in note for note in silent[0].notes)


def test_a_rank_that_somebody_terminated_is_the_culprit_and_no_hang() -> None:
    lost = event("failure", line=5, type="RuntimeError", message="Connection closed by peer [127.0.0.1]:1", op="all_reduce")
    made = run([recording([lost], rank=0), recording(rank=1)], exits=(1, -signal.SIGTERM))
    _, found = judge(made, select=("LAU101", "LAU102", "HNG"))
    assert codes(found) == ["LAU102"] and found[0].ranks == (1,)


def test_a_terminated_rank_fell_with_the_one_that_failed() -> None:
    failed = event("failure", line=5, type="ValueError", message="bad")
    made = run([recording([failed], rank=0), recording(rank=1)], exits=(1, -signal.SIGTERM))
    _, found = judge(made, select=("LAU101", "LAU102"))
    assert codes(found) == ["LAU101"] and found[0].ranks == (0,)


def test_the_supervisors_count_tells_an_out_of_memory_kill() -> None:
    made = run([recording(rank=0)], exits=(-signal.SIGKILL,))
    assert codes(judge(made, select=("LAU102", "LAU103"))[1]) == ["LAU102"]
    made = with_ending(run([recording(rank=0)], exits=(-signal.SIGKILL,)), oom_kills=1)
    assert codes(judge(made, select=("LAU102", "LAU103"))[1]) == ["LAU103"]
    made = with_ending(run([recording(rank=0)], exits=(-signal.SIGSEGV,)), oom_kills=1)
    assert codes(judge(made, select=("LAU102", "LAU103"))[1]) == ["LAU102"]


# ---- the launcher and the folder


def test_a_dead_launcher_is_named_where_no_rank_is_to_blame() -> None:
    made = run([recording(rank=0), recording(rank=1)], exits=(-15, -15))
    exits = tuple(replace(e, by_us=True) for e in made.ending.exits)
    made = with_ending(made, exits=exits, launcher_error="the launcher ended with killed by SIGKILL\nlast words")
    _, found = judge(made, select=("LAU",))
    assert codes(found) == ["LAU126"] and found[0].message == "the launcher ended with killed by SIGKILL"
    assert found[0].notes == ("ranks 0-1 were ended with it", "last words")


def test_ranks_that_lost_their_peers_with_the_launcher_are_victims() -> None:
    lost = event("failure", line=5, type="RuntimeError", message="Connection closed by peer [10.0.0.2]:4711", op="all_reduce", trace="")
    made = run([recording([lost], rank=0), recording(rank=1)], exits=(1, 0))
    made = with_ending(made, exits=made.ending.exits[:1], launcher_error="the supervisor on n2 went away without a word; rank 1 went with it")
    assert codes(judge(made, select=("LAU",))[1]) == ["LAU126"]


def test_a_launcher_that_only_passes_on_a_failure_is_not_named() -> None:
    failed = event("failure", line=5, type="ValueError", message="bad")
    made = with_ending(run([recording([failed], rank=0)], exits=(1,)), launcher_error="the launcher ended with exit code 1")
    assert codes(judge(made, select=("LAU126",))[1]) == []


def test_a_deleted_run_folder_is_told_and_nothing_else() -> None:
    made = run([], nproc=2)
    made = with_ending(made, reason="folder-deleted", started=True)
    _, found = judge(made, select=("LAU",))
    assert codes(found) == ["LAU125"] and "was deleted" in found[0].message
    assert codes(judge(with_ending(run([recording(rank=0)], exits=(0,)), reason="exited"), select=("LAU125",))[1]) == []


# ---- dead peers and collectives under one rank


def gone(how: str, code: int = 0) -> Run:
    waits = event("coll", line=20, op="all_reduce", world=True, n=0)
    lost = event("failure", line=20, type="RuntimeError", message="Connection closed by peer [127.0.0.1]:1", op="all_reduce", phase="train")
    left = [event("coll", line=3, op="barrier", world=True), event("exit_call", code=0, how=how, line=14), event("end", how=how, code=0)]
    first = event("coll", line=3, op="barrier", world=True)
    return run([recording([first, waits, lost], rank=0), recording(left, rank=1)], exits=(1, code))


def test_a_rank_that_leaves_by_os_exit_is_a_dead_peer() -> None:
    _, found = judge(gone("os._exit"), select=("HNG", "OUT101", "LAU101"))
    assert codes(found) == ["HNG106"]
    assert found[0].ranks == (1,) and found[0].where is not None and found[0].where.line == 14


def test_a_rank_that_comes_to_its_end_leaves_a_lone_collective() -> None:
    _, found = judge(gone("exit"), select=("OUT101", "LAU101"))
    assert codes(found) == ["OUT101"] and found[0].where is not None and found[0].where.line == 20


def test_a_rank_that_stands_in_its_own_code_does_not_make_a_lone_collective() -> None:
    first = event("coll", line=3, op="barrier", world=True)
    wait = event("coll", line=20, op="all_reduce", world=True, n=1)
    held = event("stall", line=20, op="all_reduce", op_site="/home/u/train.py:20:main", stack=[], inner="all_reduce")
    stall = event("stall", line=14, op="", op_site="", stack=[{"file": "/home/u/train.py", "line": 14, "func": "main", "text": "wait()"}], inner="wait")
    made = run([recording([first, wait, held], rank=0), recording([first, stall], rank=1)], exits=(-15, -15), reason="hang")
    made = with_ending(made, exits=tuple(replace(e, by_us=True) for e in made.ending.exits))
    _, found = judge(made, select=("HNG", "OUT101"))
    assert codes(found) == ["HNG101"] and found[0].ranks == (1,)
    assert found[0].where is not None and found[0].where.line == 14


def test_the_ending_of_this_house_has_harmless_defaults() -> None:
    assert Ending().oom_kills == 0 and Ending().launcher_error == ""


# ---- causes beside the exception


def fell(message: str, *before: Any, kind: str = "ValueError") -> Any:
    made = run([recording([*before, event("failure", line=40, type=kind, message=message)])], exits=(1,))
    _, found = judge(made, select=("LAU101",))
    assert codes(found) == ["LAU101"]
    return found[0]


NO_GROUP = "Default process group has not been initialized, please make sure to call init_process_group."


def test_a_group_that_is_gone_is_the_line_that_destroyed_it() -> None:
    found = fell(NO_GROUP, event("pg", done=True, asked={}, line=5), event("pg_destroy", line=31))
    assert found.where.line == 31 and "line 40 still needs it" in found.notes[0] and "last" in found.help


def test_a_group_that_never_was_stays_at_the_line_that_raised() -> None:
    found = fell(NO_GROUP)
    assert found.where.line == 40 and "never called init_process_group" in found.notes[0]


def test_joining_twice_names_the_first_time() -> None:
    found = fell("trying to initialize the default process group twice!", event("pg", done=True, asked={}, line=5))
    assert found.where.line == 40 and "train.py:5" in found.notes[0]


def test_what_torch_says_is_told_in_the_words_of_the_script() -> None:
    found = fell("'DistributedDataParallel' object has no attribute 'encode'", kind="AttributeError")
    assert "model.module" in found.help and found.notes[0].startswith("the wrapper is not the model")


def test_an_exception_of_the_users_own_is_not_explained_away() -> None:
    found = fell("'image'", kind="KeyError")
    assert not found.notes and found.help.startswith("fix this line")


def test_an_exception_that_was_caught_is_not_shown_as_the_first_failure() -> None:
    from harness.report.failure import failure_lines

    caught = event("failure", line=54, type="Preempted", message="", trace="")
    assert failure_lines(run([recording([caught], rank=0), recording(rank=1)], exits=(0, 0)), ()) == []
    assert failure_lines(run([recording([caught], rank=0), recording(rank=1)], exits=(1, 0)), ())[0].startswith("rank 0 failed first")
@pytest.mark.parametrize(("type_", "trace", "op", "known"), [
    ("ConnectionRefusedError", "in get\n in rebuild_storage_fd\n in detach", "", True),
    ("FileNotFoundError", "in get\n in rebuild_storage_fd\n in detach", "", True),
    ("ConnectionRefusedError", "in connect", "", False),  # a socket of the script's own
    ("ConnectionResetError", "in rebuild_storage_fd", "data", False),  # a loader worker that was killed
])  # fmt: skip
def test_a_tensor_whose_sender_has_ended(type_: str, trace: str, op: str, known: bool) -> None:
    joined = event("process_join", line=73, exitcode=0, left=False, at={"file": "/home/u/train.py", "line": 75, "func": "main", "text": "p.join()"})
    made = run([recording([joined, event("failure", line=76, type=type_, message="no", trace=trace, op=op)])], exits=(1,))
    _, found = judge(made, select=("LAU101",))
    told = " ".join((*found[0].notes, found[0].help, found[0].message))
    assert ("the sender has ended" in told) == known and ("train.py:75" in told) == known
