"""Launch checks on recordings made by hand: who is blamed, and who is left in peace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.checks.lau import blame
from harness.checks.lau.killed_by_signal import KilledBySignal, dying_frame
from harness.checks.lau.left_behind import LeftBehind
from harness.checks.lau.local_rank_argument import LocalRankArgument
from harness.checks.lau.no_process_group import NoProcessGroup
from harness.checks.lau.out_of_memory_kill import OutOfMemoryKill
from harness.checks.lau.rank_did_not_report import RankDidNotReport
from harness.checks.lau.rank_failed import RankFailed
from harness.checks.lau.rendezvous_failed import RendezvousFailed
from harness.checks.lau.same_rank_twice import SameRankTwice
from harness.checks.lau.thread_died import ThreadDied
from harness.checks.lau.untested_torch_version import UntestedTorchVersion
from harness.checks.lau.wall_limit import WallLimit
from harness.checks.lau.world_size_mismatch import WorldSizeMismatch
from harness.model import Ending, RankExit, Severity
from harness.probe import protocol
from harness.record import Event, Recording, Run
from tests.unit.checks.builder import event, findings, recording, row, run, site

CLOSED = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"


def failure(kind: str, message: str, line: int = 10, **fields: Any) -> Event:
    return event("failure", type=kind, message=message, line=line, op="", phase="train", trace="", **fields)


def ended(of: Run, *codes: tuple[int, bool]) -> Run:
    """Exit codes, and whether we ended the rank."""
    exits = tuple(RankExit(rank, 1000 + rank, code, 1 << 60, by_us) for rank, (code, by_us) in enumerate(codes))
    of.ending = replace(of.ending, exits=exits)
    return of


def test_the_culprit_is_named_although_the_victim_failed_first() -> None:
    victim = recording([failure("RuntimeError", CLOSED, 88)], rank=0)
    culprit = recording([failure("KeyError", "'image'\nsecond line", 41)], rank=1)
    found = findings(RankFailed, run([victim, culprit], exits=(1, 1)))
    assert [f.message for f in found] == ["rank 1 failed with KeyError: 'image'"]
    assert found[0].ranks == (1,) and found[0].where and found[0].where.line == 41
    assert found[0].notes == ("rank 0 lost the connection to a peer and fell as a victim",)


def exists(path: str = "runs/a") -> Event:
    return failure("FileExistsError", f"[Errno 17] File exists: '{path}'", line=21)


def test_a_folder_that_another_rank_made() -> None:
    def said(*by_rank: list[Event]) -> Any:
        codes = [(1, False) if any(e.kind == "failure" for e in events) else (-15, True) for events in by_rank]
        return findings(RankFailed, ended(run([recording(e, rank=r) for r, e in enumerate(by_rank)]), *codes))[0]

    mine = event("mkdir", line=21, path="/w/runs/a")
    found = said([mine], [mine, exists()])
    assert "rank 0 of this job made it" in found.notes[0] and "exist_ok=True" in found.help and found.where.line == 21
    for others in ([mine, exists()], [event("mkdir", line=21, path="/w/runs/b")], []):  # there before the run; another folder; nobody asked
        assert "exist_ok" not in said(others, [mine, exists()]).help


def test_a_tensor_that_to_does_not_convert() -> None:
    told = {"name": "freq", "module": "Net", "has": ["float32", "cpu"], "wants": ["float64", "cpu"], "set_at": site(23, "self.freq = torch.arange(9)")}
    failed = failure("RuntimeError", "expected m1 and m2 to have the same dtype", line=27, left_behind=told)
    (found,) = findings(RankFailed, ended(run([recording([failed])]), (1, False)))
    assert found.where is not None and found.where.line == 23 and 'register_buffer("freq"' in found.help and "line 27" in found.notes[0]
    for odd in (None, {}, {"name": "x", "has": 3}):
        plain = failure("RuntimeError", "expected m1 and m2 to have the same dtype", line=27, left_behind=odd)
        (found,) = findings(RankFailed, ended(run([recording([plain])]), (1, False)))
        assert found.where is not None and found.where.line == 27


def test_a_rank_that_we_tore_down_is_no_failure() -> None:
    of = run([recording([failure("ValueError", "bad", 5)], rank=0), recording(rank=1)], exits=(1, 1))
    found = findings(RankFailed, ended(of, (1, False), (-15, True)))
    assert found[0].notes == ("rank 1 was torn down by the launcher",)


def test_an_exception_that_was_caught_is_silent() -> None:
    assert findings(RankFailed, run([recording([failure("ValueError", "caught")])], exits=(0,))) == []


def test_an_exit_code_without_exception_names_the_last_line_and_the_call() -> None:
    of = run(
        [recording([event("exit_call", code=3, line=7)])], exits=(3,), logs={0: "usage: train.py\ntrain.py: error: unrecognized arguments"}
    )
    (found,) = findings(RankFailed, of)
    assert "exit code 3" in found.message and "unrecognized arguments" in found.message
    assert found.where and found.where.line == 7


def test_a_child_of_mp_spawn_counts_for_its_parent() -> None:
    child = recording([failure("KeyError", "x", 20)], rank=0, pid=2000, ppid=1000, role="child")
    parent = recording([failure("ProcessRaisedException", "-- Process 0 terminated", 50)], rank=0)
    (found,) = findings(RankFailed, run([parent, child], exits=(1,)))
    assert found.where and found.where.line == 20


@pytest.mark.parametrize("text", [CLOSED, "Timed out waiting 1800000ms for recv operation to complete", "Broken pipe", "Socket closed"])
def test_victims_are_recognised(text: str) -> None:
    assert blame.is_victim(failure("RuntimeError", text))


@pytest.mark.parametrize("text", ["shape mismatch", "Target 10 is out of bounds", "file not found: peer.txt"])
def test_own_failures_are_not_victims(text: str) -> None:
    assert not blame.is_victim(failure("RuntimeError", text))


def test_compress() -> None:
    assert blame.compress([7, 0, 2, 3, 4]) == "0,2-4,7"


def test_a_loader_worker_is_shown_with_its_own_line() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/x/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop\n'
        "    data = fetcher.fetch(index)\n"
        '  File "/home/u/train.py", line 13, in __getitem__\n    raise ValueError("corrupt sample 100")\nValueError: corrupt sample 100\n'
    )
    (found,) = findings(RankFailed, run([recording([failure("ValueError", text, 19)])], exits=(1,)))
    assert found.message == "rank 0 failed with ValueError: corrupt sample 100 in DataLoader worker process 0"
    assert found.where and (found.where.line, found.where.function) == (13, "__getitem__")


STACK = """RuntimeError elsewhere
Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/home/u/helper.py", line 3 in idle

Current thread 0x2 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/c10d.py", line 900 in all_reduce
  File "/home/u/harness/probe/sensors/collectives.py", line 80 in collective
  File "/home/u/train.py", line 61 in sync
"""


def test_a_signal_is_named_with_the_python_line_that_died() -> None:
    of = run([recording(rank=0), recording(rank=1)], exits=(1, -6), logs={0: CLOSED, 1: "terminate called after throwing X\n" + STACK})
    (found,) = findings(KilledBySignal, of)
    assert found.message == "rank 1 was killed by SIGABRT"
    assert found.where and (found.where.file, found.where.line) == ("/home/u/train.py", 61)
    assert "terminate called" in found.notes[0]
    assert findings(RankFailed, of) == []


@pytest.mark.parametrize(
    ("kinds", "log", "severity"),
    [
        ((("end",), ("end",)), "done\nterminate called without an active exception\n", Severity.ADVICE),
        ((("end",), ()), "terminate called without an active exception\n", Severity.ERROR),  # rank 1 was at work
        (((), ("end",)), "terminate called without an active exception\n", Severity.ERROR),  # rank 0 was
        ((("end",), ("end",)), "", Severity.ERROR),
    ],
)
def test_an_abort_behind_the_scripts_end(kinds: tuple[tuple[str, ...], ...], log: str, severity: Severity) -> None:
    of = run([recording([event(k) for k in own], rank=r) for r, own in enumerate(kinds)], exits=(0, -6), logs={1: log})
    (found,) = findings(KilledBySignal, ended(of, (0, False), (-6, False)))
    assert found.severity is severity and ("after the script's last line" in found.message) == (severity is Severity.ADVICE)


def test_an_abort_over_a_closed_connection_is_a_victims() -> None:
    of = run(
        [recording([failure("KeyError", "x", 9)], rank=0), recording(rank=1)], exits=(1, -6), logs={1: "what(): Connection closed by peer"}
    )
    assert findings(KilledBySignal, of) == []
    assert findings(RankFailed, of)[0].ranks == (0,)


def test_no_stack_no_place() -> None:
    assert dying_frame("no stack here") is None


def test_sigkill_with_a_counted_kill_is_out_of_memory() -> None:
    of = run(
        [recording([event("oom_kills", scope="cgroup", num=1)], rank=0), recording(rows=[row(0, rss_bytes=3 << 30)], rank=1)], exits=(1, -9)
    )
    of = ended(of, (0, False), (-9, False))
    (found,) = findings(OutOfMemoryKill, of)
    assert found.ranks == (1,) and "3.0 GiB" in found.message
    assert findings(KilledBySignal, of) == []


def test_sigkill_without_evidence_is_only_a_signal() -> None:
    of = ended(run([recording(rank=0), recording(rank=1)]), (0, False), (-9, False))
    assert findings(OutOfMemoryKill, of) == []
    assert "SIGKILL" in findings(KilledBySignal, of)[0].message


def pg(done: bool, line: int = 4, **fields: object) -> Event:
    return event("pg", done=done, line=line, **{"asked": {}, "world_size": None, **fields})


def test_world_size_asked_for_is_not_the_launchers() -> None:
    of = run([recording([pg(False, asked={"world_size": 4})], rank=r) for r in range(2)], reason="hang")
    (found,) = findings(WorldSizeMismatch, of)
    assert "asks for 4 processes" in found.message and found.where and found.where.line == 4


def test_a_world_of_one_on_every_rank() -> None:
    of = run([recording([pg(True, rank=0, world_size=1, backend="gloo")], rank=r) for r in range(2)])
    (found,) = findings(WorldSizeMismatch, of)
    assert "2 independent trainings" in found.message


def test_the_launchers_world_is_silent() -> None:
    of = run([recording([pg(False), pg(True, rank=r, world_size=2, backend="gloo")], rank=r) for r in range(2)])
    assert findings(WorldSizeMismatch, of) == []


@pytest.mark.parametrize("came", [True, False])
def test_a_rank_0_that_starts_the_others_itself(came: bool) -> None:
    asked = pg(False, asked={"world_size": 2})
    ranks = [recording([asked, *([pg(True, rank=r, world_size=2)] if came else [])], role="child" if r else "main") for r in range(2)]
    assert bool(findings(WorldSizeMismatch, run(ranks))) != came


def test_a_helper_group_of_one_rank_is_silent() -> None:
    first = recording([pg(True, rank=0, world_size=2, backend="gloo"), pg(True, rank=0, world_size=1, backend="gloo")], rank=0)
    second = recording([pg(True, rank=1, world_size=2, backend="gloo")], rank=1)
    assert findings(WorldSizeMismatch, run([first, second])) == []


def test_ranks_that_train_alone() -> None:
    of = run([recording([event("params", opt=0, shapes=[[2]], line=12)], [row(0), row(1)], rank=r) for r in range(2)])
    (found,) = findings(NoProcessGroup, of)
    assert found.severity is Severity.ERROR and "2 independent trainings" in found.message and found.where and found.where.line == 12


def test_a_call_that_no_rank_came_to() -> None:
    def ranks(*decided: int | None) -> Run:
        made = event("params", opt=0, shapes=[[2]], line=12)
        told = [event("unjoined", line=8, decided=site(d) if d else None) for d in decided]
        return run([recording([made, t], [row(0), row(1)], rank=r) for r, t in enumerate(told)])

    (found,) = findings(NoProcessGroup, ranks(5, 5))
    assert found.where and found.where.line == 5 and "line 8 was not reached" in found.notes[1] and "environment" in found.help
    (found,) = findings(NoProcessGroup, ranks(None, None))
    assert found.where and found.where.line == 12 and "line 8" in found.notes[1]
    (found,) = findings(NoProcessGroup, ranks(5, 6))
    assert found.where and found.where.line == 12 and len(found.notes) == 1 and found.help.startswith("call")


def test_a_search_over_settings_is_advice() -> None:
    of = run([recording([], [row(0, lr=0.1 * (r + 1), hyper=r)], rank=r) for r in range(2)])
    assert [f.severity for f in findings(NoProcessGroup, of)] == [Severity.ADVICE]


def test_one_process_alone_is_healthy() -> None:
    assert findings(NoProcessGroup, run([recording([], [row(0)])])) == []


def declares(rank: int, default: int, argv: list[str] | None = None, events: tuple[Event, ...] = ()) -> Recording:
    told = event("local_rank_argument", option="--local-rank", default=default, line=3)
    return recording([told, *events], [row(0)], rank=rank, local_rank=rank, argv=argv or ["train.py"])


def test_local_rank_default_switches_distribution_off() -> None:
    (found,) = findings(LocalRankArgument, run([declares(0, -1), declares(1, -1)]))
    assert "no process group was made" in found.message and found.where and found.where.line == 3


def test_a_script_that_is_named_after_the_option() -> None:
    of = run([declares(r, -1, argv=["/runs/7_local_rank_flag/train.py"]) for r in range(2)])
    assert len(findings(LocalRankArgument, of)) == 1


def test_a_local_rank_default_as_the_rank_of_the_sampler() -> None:
    def dealt(of: int, replicas: int = 2) -> list[Event]:
        fields = {"loop": 1, "loader": 0}
        return [
            event("loader", line=64, distributed={"num_replicas": replicas, "rank": of}, **fields),
            event("pass", line=64, grad=True, backwards=3, complete=True, **fields),
        ]

    joined = [pg(True, rank=r, world_size=2, backend="gloo") for r in range(2)]
    of = run([declares(r, 0, events=(joined[r], *dealt(0))) for r in range(2)])
    assert [f.message.partition("and ")[2] for f in findings(LocalRankArgument, of)] == ["every rank draws the share of rank 0"]
    of = run([declares(r, 0, events=(joined[r], *dealt(r))) for r in range(2)])
    assert findings(LocalRankArgument, of) == []
    of = run([declares(r, 0, events=(joined[r], *dealt(0, replicas=1))) for r in range(2)])
    assert findings(LocalRankArgument, of) == []  # all draw the global batch, which is cut later, or work on one model in parts


def test_local_rank_passed_or_overridden_is_silent() -> None:
    joined = pg(True, rank=0, world_size=2, backend="gloo")
    assert findings(LocalRankArgument, run([declares(r, 0, events=(joined,)) for r in range(2)])) == []
    assert findings(LocalRankArgument, run([declares(r, 0, ["train.py", f"--local-rank={r}"]) for r in range(2)])) == []
    assert findings(LocalRankArgument, run([declares(r, r) for r in range(2)])) == []


def test_a_taken_port_is_a_failed_rendezvous() -> None:
    raised = failure("DistNetworkError", "The server socket has failed to listen: EADDRINUSE, address already in use", 4)
    start = event("rendezvous", address="127.0.0.1", port="29500", rank="0", world_size="2", line=4)
    of = run([recording([start, pg(False), replace_op(raised, "init")], rank=0)], exits=(1,), nproc=2)
    (found,) = findings(RendezvousFailed, of)
    assert "its port is taken" in found.message and "29500" in found.notes[0]


def replace_op(of: Event, op: str) -> Event:
    return Event(of.kind, of.t_ns, of.step, {**of.data, "op": op})


def test_a_failure_after_the_rendezvous_is_not_one() -> None:
    joined = pg(True, rank=0, world_size=1, backend="gloo")
    of = run([recording([pg(False), joined, failure("ConnectionRefusedError", "connection refused", 30)])], exits=(1,))
    assert findings(RendezvousFailed, of) == []


def test_two_processes_ask_for_one_rank() -> None:
    asks = {"address": "127.0.0.1", "port": "29500", "world_size": "2", "asked_rank": 0}
    of = run([recording([event("rendezvous", line=4, rank=str(r), **asks)], rank=r) for r in range(2)])
    (found,) = findings(SameRankTwice, of)
    assert found.message == "2 processes ask to be rank 0"
    asks["asked_rank"] = None
    of = run([recording([event("rendezvous", line=4, rank=str(r), **asks)], rank=r) for r in range(2)])
    assert findings(SameRankTwice, of) == []


@pytest.mark.parametrize(
    ("role", "asked", "ports", "num"),
    [("child", None, ("1", "1"), 1), ("child", 0, ("1", "1"), 0), ("child", None, ("1", "2"), 0), ("main", None, ("1", "1"), 0)],
)
def test_spawned_processes_that_inherit_a_world_of_one(role: str, asked: int | None, ports: tuple[str, str], num: int) -> None:
    asks = {"address": "127.0.0.1", "world_size": "1", "rank": "0", "asked_rank": asked}
    of = run([recording([event("rendezvous", line=4, port=port, **asks)], role=role, pid=i) for i, port in enumerate(ports, 11)])
    found = findings(SameRankTwice, of)
    assert len(found) == num and all("rank 0 of a world of 1" in f.message for f in found)


@pytest.mark.parametrize(("left", "num"), [("pg_destroy", 0), ("end", 0), ("", 1)])
def test_phases_that_spawn_their_processes_one_after_the_other_do_not_share_a_rank(left: str, num: int) -> None:
    """The DDP tutorial: three demos by mp.spawn, each with a rank 0, at one address."""
    asks = {"address": "localhost", "port": "12355", "world_size": "2", "asked_rank": 0, "rank": None}
    first = recording([event("rendezvous", line=4, t=10, **asks), *([event(left, t=20)] if left else [])], role="child", pid=11)
    second = recording([event("rendezvous", line=4, t=30, **asks)], role="child", pid=12)
    assert len(findings(SameRankTwice, run([first, second]))) == num


@pytest.mark.parametrize(("heard_ns", "num"), [(20, 0), (40_000_000_000, 1)])
def test_a_rank_that_was_killed_in_its_group_has_left_it(heard_ns: int, num: int) -> None:
    """torchrun ends the peers of a rank that failed, and starts all of them again."""
    asks = {"address": "localhost", "port": "12355", "world_size": "2", "asked_rank": None, "rank": "0"}
    first = recording([event("rendezvous", line=4, t=10, **asks), event("pg", done=True, t=11, rank=0, world_size=2)], role="child", pid=11)
    first.status = protocol.Status(11, heard_ns, 1, 0, 12, "train", "backward", "")
    second = recording([event("rendezvous", line=4, t=30_000_000_000, **asks)], role="child", pid=12)
    assert len(findings(SameRankTwice, run([first, second]))) == num


@pytest.mark.parametrize(("attempts", "num"), [(("1", "2"), 0), (("1", "1"), 1)])
def test_attempts_of_torchrun_follow_each_other(attempts: tuple[str, str], num: int) -> None:
    """The first was ended while it waited for rank 1, and tells nothing of it."""
    asks = {"line": 4, "address": "localhost", "port": "12355", "world_size": "2", "asked_rank": None, "rank": "0"}
    ranks = [recording([event("rendezvous", attempt=attempt, **asks)], role="child", pid=11 + n) for n, attempt in enumerate(attempts)]
    assert len(findings(SameRankTwice, run(ranks))) == num


@pytest.mark.parametrize(("version", "num"), [("2.14.1+cpu", 0), ("2.9.0", 0), ("2.5.1", 1), ("3.0.0", 1), ("weird", 0)])
def test_untested_versions_are_advice(version: str, num: int) -> None:
    assert len(findings(UntestedTorchVersion, run([recording([event("torch", version=version)])]))) == num


def test_a_silent_rank_is_an_error() -> None:
    (found,) = findings(RankDidNotReport, run([recording(rank=0)], exits=(0, 0), nproc=2))
    assert found.ranks == (1,)
    assert findings(RankDidNotReport, run([recording(rank=0), recording(rank=1)])) == []
    assert findings(RankDidNotReport, run([recording(rank=0)], nproc=2, reason="interrupted")) == []
    assert findings(RankDidNotReport, run([recording(rank=0)], nproc=2, live=True)) == []


def test_what_is_left_behind_is_told() -> None:
    of = run([recording()])
    assert findings(LeftBehind, of) == []
    of.ending = replace(of.ending, left_behind=("process 77 (sleep) outlived its rank and had to be killed",))
    assert findings(LeftBehind, of)[0].severity is Severity.WARNING


def test_the_wall_limit() -> None:
    assert findings(WallLimit, run([recording([], [row(0)])])) == []
    assert "took 1 steps" in findings(WallLimit, run([recording([], [row(0)])], reason="timeout"))[0].notes[0]


@pytest.mark.parametrize(("stalled_s", "moves", "still"), [((16.0, 16.0), False, True), ((16.0, 2.0), False, False), ((16.0, 16.0), True, False)])
def test_a_wall_limit_says_where_the_ranks_stood(stalled_s: tuple[float, float], moves: bool, still: bool) -> None:
    own = []
    for rank, seconds in enumerate(stalled_s):
        stall = event("stall", line=10, op="", op_site="", stalled_s=seconds, inner="acquire", stack=[site(10)])
        own.append(recording([stall, *([event("coll", line=12, op="barrier")] if moves else [])], rank=rank))
    (found,) = findings(WallLimit, run(own, exits=(-15, -15), reason="timeout"))
    assert ("for at least 16 s" in found.message and found.where is not None and found.where.line == 10) is still
    assert any("rank 1 is at" in note for note in found.notes) is still


ALL = (
    KilledBySignal, LeftBehind, LocalRankArgument, NoProcessGroup, OutOfMemoryKill, RankDidNotReport, RankFailed, RendezvousFailed,
    SameRankTwice, UntestedTorchVersion, WallLimit, WorldSizeMismatch,
)  # fmt: skip


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("live", [False, True])
def test_empty_and_malformed_recordings_never_crash(check: type, live: bool) -> None:
    torn = [
        event(kind, line=1) for kind in ("failure", "pg", "rendezvous", "torch", "local_rank_argument", "params", "oom_kills", "exit_call")
    ]
    torn.append(event("failure", site=site(), type=None, message=None))
    findings(check, run([], live=live))
    findings(check, run([recording(), recording(rank=1)], live=live))
    findings(check, run([recording(torn, [row(0)[:50]]), recording(torn, rank=1)], exits=(1, -9), live=live))


def test_an_ending_that_is_unknown_blames_nobody() -> None:
    of = run([recording()])
    of.ending = Ending()
    assert blame.culprit(of) is None


@pytest.mark.parametrize(("parents", "two_launchers"), [((1000, 1001), True), ((1000, 1000), False)])
def test_ranks_of_a_launcher_that_spawn_worlds_of_their_own(parents: tuple[int, int], two_launchers: bool) -> None:
    def child(pid: int, ppid: int) -> Recording:
        met = event("rendezvous", line=25, rank=0, world_size=2, asked_rank=0, asked_world_size=2, address="127.0.0.1", port="29877", method="")
        return recording([met], rank=0, pid=pid, ppid=ppid, role="child")

    mains = [recording([event("process_start", line=60, child=2000 + i) for i in (0, 1)], rank=r, pid=1000 + r, world_size=2) for r in (0, 1)]
    (found,) = findings(SameRankTwice, run([*mains, child(2000, parents[0]), child(2001, parents[1])]))
    assert ("two launchers" in found.message) == two_launchers
    assert found.where is not None and found.where.line == (60 if two_launchers else 25)


def test_a_rank_that_another_program_took_over_did_not_report() -> None:
    """os.execv into `python -I`: the first interpreter reported, what trains did not."""
    from harness.checks.engine import judge

    gone = recording([event("exec", file="/usr/bin/python", line=3)], rank=0)
    made = run([gone, recording(rank=1)], exits=(0, 0))
    _, found = judge(made, select=("LAU121",))
    assert [f.ranks for f in found] == [(0,)]
    made.processes.append(recording(rank=0, pid=gone.pid))  # it was armed again, as another recording of this pid
    assert judge(made, select=("LAU121",))[1] == []


def with_thread(at: int = 4, code: int = 0, thread: str = "feeder", message: str = "shard is gone") -> Run:
    died = failure("OSError", message, 33, thread=thread, t=1_000_000_000 + at * 10_000_000 + 1)
    rows = [row(step) for step in range(8)]
    return run([recording([died], rows, rank=0), recording([], rows, rank=1)], exits=(code, 0))


def test_a_thread_that_dies_under_a_rank_that_goes_on() -> None:
    (found,) = findings(ThreadDied, with_thread())
    assert found.message == "a thread of rank 0 (feeder) ended with OSError: shard is gone, and the rank went on without it"
    assert found.where is not None and found.where.line == 33 and found.notes == ("the rank took 3 steps after that",)
    assert found.severity is Severity.WARNING
    (last,) = findings(ThreadDied, with_thread(at=9))
    assert last.severity is Severity.ADVICE
    assert findings(RankFailed, with_thread()) == []


def test_a_thread_is_no_finding_of_its_own_where_its_rank_failed_or_a_peer_went_away() -> None:
    assert findings(ThreadDied, with_thread(code=1)) == []  # LAU101 tells
    assert findings(ThreadDied, with_thread(thread="main")) == []  # it was caught
    assert findings(ThreadDied, with_thread(message=CLOSED)) == []
