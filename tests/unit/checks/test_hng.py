"""Hang checks: where each rank stood, and which of the codes says it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.checks.engine import judge
from harness.checks.hng import waits
from harness.checks.hng.collectives_do_not_match import CollectivesDoNotMatch
from harness.checks.hng.dead_peer import DeadPeer
from harness.checks.hng.deadlocked_worker import DeadlockedWorker
from harness.checks.hng.groups_made_apart import GroupsMadeApart
from harness.checks.hng.hang import Hang
from harness.checks.hng.missing_peer_at_start import MissingPeerAtStart
from harness.model import RankExit, RankStacks, Severity, Where
from harness.record import Event, Recording, Run
from tests.unit.checks.builder import event, findings, recording, row, run, site

CLOSED = "Connection closed by peer [127.0.0.1]:4711"
LATE = 3_000_000_000_000


def stall(op: str, line: int, inner: str = "wait") -> Event:
    at = f"/home/u/train.py:{line}:main" if op else ""
    return event("stall", t=LATE, op=op, op_site=at, stalled_s=4.0, inner=inner, stack=[site(line)], line=line)


def hung(*recordings: Recording) -> Run:
    of = run(list(recordings), reason="hang")
    of.ending = replace(of.ending, exits=tuple(RankExit(r, 1000 + r, -9, LATE, by_us=True) for r in range(len(recordings))))
    return of


def test_collectives_that_cannot_meet() -> None:
    of = hung(*(recording([stall("all_reduce", 88)], rank=r) for r in (0, 1)), recording([stall("barrier", 61)], rank=2))
    (found,) = findings(CollectivesDoNotMatch, of)
    assert found.message.endswith("ranks 0-1 wait in all_reduce (train.py:88); rank 2 waits in barrier (train.py:61)")
    assert found.where and found.where.line == 61


def test_one_call_on_two_lines_waits_for_the_rank_that_is_elsewhere() -> None:
    """if/else around one broadcast: it can meet; rank 2 is in code of its own."""
    apart = [recording([stall("broadcast", 40 + r)], rank=r) for r in (0, 1)]
    assert findings(CollectivesDoNotMatch, hung(*apart, recording([stall("", 12)], rank=2))) == []
    assert findings(Hang, hung(*apart, recording([stall("", 12)], rank=2)))[0].ranks == (2,)
    assert len(findings(CollectivesDoNotMatch, hung(*apart))) == 1


def test_a_collective_of_the_script_is_looked_at_before_the_reducers() -> None:
    of = hung(recording([stall("backward", 40)], rank=0), recording([stall("barrier", 61)], rank=1))
    assert findings(CollectivesDoNotMatch, of)[0].where == Where("/home/u/train.py", 61, "main", "do()")


def test_one_rank_computes_while_the_others_wait() -> None:
    of = hung(recording([stall("all_reduce", 88)], rank=0), recording([stall("", 12)], rank=1))
    assert findings(CollectivesDoNotMatch, of) == []
    (found,) = findings(Hang, of)
    assert "rank 1 is at train.py:12, in no collective" in found.message
    assert found.where and found.where.line == 12


def test_the_same_collective_everywhere_is_a_plain_hang() -> None:
    of = hung(*(recording([stall("all_reduce", 88)], [row(0)], rank=r) for r in (0, 1)))
    assert findings(CollectivesDoNotMatch, of) == []
    assert "ranks 0-1 wait in all_reduce" in findings(Hang, of)[0].message


def test_a_note_older_than_the_last_step_does_not_count() -> None:
    early = event("stall", t=1, op="barrier", op_site="", stack=[], line=5)
    of = hung(recording([early], [row(3, t_ns=LATE)], rank=0))
    assert [w.op for w in waits.waits(of)] == [""]


def test_stacks_that_were_asked_for_tell_too() -> None:
    frames = (Where("/home/u/train.py", 70, "main"), Where("/x/site-packages/torch/distributed/c10d.py", 9, "barrier"))
    of = hung(recording(rank=0), recording([stall("all_reduce", 88)], rank=1))
    of.ending = replace(of.ending, stacks=(RankStacks(0, {"MainThread": frames}),))
    assert "rank 0 waits in barrier (train.py:70)" in findings(CollectivesDoNotMatch, of)[0].message


def test_the_last_collective_is_the_fallback() -> None:
    of = hung(recording([event("coll", op="all_reduce", line=33)], rank=0))
    assert waits.waits(of)[0].sentence == "waits in all_reduce (train.py:33)"


def test_a_peer_that_left_in_good_order() -> None:
    victim = recording([event("failure", type="RuntimeError", message=CLOSED, op="all_reduce", line=88)], [row(0), row(1)], rank=0)
    of = run([victim, recording([event("end", how="exit", code=0, steps=1)], [row(0)], rank=1)], exits=(1, 0))
    (found,) = findings(DeadPeer, of)
    assert found.message == "rank 1 had ended while rank 0 waits in all_reduce (train.py:88)"
    assert found.ranks == (1,) and found.notes == ("rank 0 took 2 steps, rank 1 took 1 steps",)


def test_a_culprit_with_an_exception_is_no_hang() -> None:
    victim = recording([event("failure", type="RuntimeError", message=CLOSED, op="all_reduce", line=88)], rank=0)
    of = run([victim, recording([event("failure", type="KeyError", message="x", line=5)], rank=1)], exits=(1, 1))
    assert [findings(c, of) for c in (DeadPeer, Hang, CollectivesDoNotMatch)] == [[], [], []]


def test_missing_peers_at_the_start() -> None:
    waiting = recording([event("pg", done=False, asked={}, line=4), stall("init", 4)], rank=0)
    of = hung(waiting, recording([stall("", 50)], rank=1))
    (found,) = findings(MissingPeerAtStart, of)
    assert found.message == "rank 0 waits in init_process_group; rank 1 never came" and found.ranks == (1,)


def meeting(rank: int, **told: Any) -> Recording:
    fields = {"rank": str(rank), "world_size": "2", "address": "10.57.23.164", "port": "8888", "method": "env://"} | told
    return recording([event("rendezvous", **fields), event("pg", done=False, asked={}, line=54), stall("init", 54)], rank=rank)


def test_an_address_that_this_machine_does_not_have() -> None:
    set_at = site(18, "os.environ['MASTER_ADDR'] = '10.57.23.164'")
    (found,) = findings(MissingPeerAtStart, hung(*(meeting(r, foreign="10.57.23.164", set_at=set_at) for r in (0, 1))))
    assert "ranks 0-1 wait for each other at 10.57.23.164, which is no address" in found.message and "127.0.0.1" in found.help
    assert found.where is not None and found.where.line == 18
    (found,) = findings(MissingPeerAtStart, hung(*(meeting(r, foreign="10.57.23.164") for r in (0, 1))))
    assert found.where is not None and found.where.line == 54
    (found,) = findings(MissingPeerAtStart, hung(*(meeting(r, foreign="") for r in (0, 1))))
    assert "although all came" in found.message
    (found,) = findings(MissingPeerAtStart, hung(meeting(0, foreign=""), meeting(1, foreign="10.57.23.164")))  # rank 1's is another machine
    assert "although all came" in found.message


def test_stores_of_their_own_on_ports_of_their_own() -> None:
    def child(pid: int, port: int) -> Recording:
        asked = {"host_name": "127.0.0.1", "port": port, "world_size": 2, "is_master": pid == 11}
        return recording([event("store", done=False, line=22, **asked), stall("store", 22)], role="child", pid=pid, ppid=10, rank=-1)

    def start(*ports: int) -> Run:
        parent = recording([event("process_start", child=11), event("process_start", child=12)], rank=0, pid=10)
        return run([parent, *(child(11 + i, port) for i, port in enumerate(ports))], reason="hang")

    (found,) = findings(MissingPeerAtStart, start(5001, 5002))
    assert found.message == "ranks 0-1 wait in TCPStore, each at an address of its own" and found.where and found.where.line == 22
    assert found.notes == ("rank 0: TCPStore 127.0.0.1:5001", "rank 1: TCPStore 127.0.0.1:5002")
    (found,) = findings(MissingPeerAtStart, start(5001))
    assert found.message == "rank 0 waits in TCPStore; rank 1 never came"


def test_a_loader_whose_workers_do_not_answer() -> None:
    of = hung(recording([event("loader", num_workers=2, line=20), stall("data", 20)], rank=0), recording([stall("backward", 30)], rank=1))
    (found,) = findings(DeadlockedWorker, of)
    assert found.message == "rank 0 waits for 2 loader workers that do not answer" and found.where and found.where.line == 20


def test_workers_that_were_forked_beside_threads() -> None:
    def help_of(**threads: Any) -> str:
        stuck = recording([event("loader", num_workers=2, line=20, threads=threads or None), stall("data", 20)], rank=0)
        return findings(DeadlockedWorker, hung(stuck, recording([stall("backward", 30)], rank=1)))[0].help

    assert "OMP_NUM_THREADS=1" in help_of(torch=2, process=4, method="fork")
    for other in ({}, {"torch": 1, "process": 4, "method": "fork"}, {"torch": 8, "process": 9, "method": "spawn"}, {"torch": 8, "process": 1, "method": "fork"}):
        assert "OMP_NUM_THREADS" not in help_of(**other)


def test_a_loader_without_workers_is_only_slow() -> None:
    of = hung(recording([event("loader", num_workers=0, line=20), stall("data", 20)], rank=0))
    assert findings(DeadlockedWorker, of) == []


def test_processes_of_the_script_that_stand_still() -> None:
    children = [recording([stall("", 116, "count_up")], pid=2000 + i, ppid=1000, role="child") for i in range(2)]
    parent = recording([stall("join", 160)], rank=0)
    of = run([parent, *children], reason="hang")
    of.ending = replace(of.ending, exits=(RankExit(0, 1000, -9, LATE, by_us=True),))
    (found,) = findings(DeadlockedWorker, of)
    assert found.message == "2 worker processes stand still in train.py:116"
    gone = recording([event("end", how="os._exit", code=1, steps=0)], pid=2001, ppid=1000, role="child")
    of = run([parent, children[0], gone], reason="hang")
    of.ending = replace(of.ending, exits=(RankExit(0, 1000, -9, LATE, by_us=True),))
    assert findings(DeadlockedWorker, of) == []
    assert "ended with code 1 while others wait" in findings(DeadPeer, of)[0].message


@pytest.mark.parametrize("joins", [True, False])
def test_processes_whose_queue_nobody_reads(joins: bool) -> None:
    def flushing(i: int) -> Recording:
        stands = stall("", 83, "_wait_for_tstate_lock")
        return recording([Event(stands.kind, stands.t_ns, 0, {**stands.data, "flushing": True})], pid=2000 + i, ppid=1000, role="child")

    parent = recording([event("joining", child=2000, line=86)] if joins else [event("process_start", child=2000, line=83)], rank=0)
    of = run([parent, flushing(0), flushing(1)], reason="hang")
    of.ending = replace(of.ending, exits=(RankExit(0, 1000, -9, LATE, by_us=True),))
    (found,) = findings(DeadlockedWorker, of)
    assert found.where is not None and found.where.line == (86 if joins else 83)
    assert "2 processes wait at the exit" in found.message and ("the parent waits for their end (train.py:86)" in found.message) == joins


def test_one_cause_gives_one_finding() -> None:
    of = hung(recording([stall("all_reduce", 88)], rank=0), recording([stall("barrier", 61)], rank=1))
    _, found = judge(of, select=("HNG", "LAU"))
    assert [f.code for f in found] == ["HNG103"] and found[0].consequences == ("HNG101",)


ALL = (CollectivesDoNotMatch, DeadPeer, DeadlockedWorker, GroupsMadeApart, Hang, MissingPeerAtStart)


@pytest.mark.parametrize("check", ALL)
def test_a_healthy_run_and_a_torn_one_are_silent(check: type) -> None:
    assert findings(check, run([recording([stall("", 3)], [row(0)], rank=r) for r in range(2)])) == []
    assert findings(check, run([recording([stall("all_reduce", 3)])], live=True)) == []
    torn = [event(kind) for kind in ("stall", "stacks", "coll", "pg", "wrapping", "failure", "end")]
    findings(check, hung())
    findings(check, hung(recording(torn, [row(0)[:9]]), recording(torn[:1], rank=1)))


@pytest.mark.parametrize(("lists", "local", "reason", "fires"), [
    (([[0, 1]], [[2, 3]]), False, "hang", True),
    (([[0, 1], [2, 3]], [[0, 1], [2, 3]]), False, "hang", False),
    (([[0, 1]], [[2, 3]]), True, "hang", False),  # only the members call
    (([[0, 1]], [[2, 3]]), False, "exited", True),  # it went well by chance
    (([[0, 1], [2, 3]], [[0, 1], [2, 3]]), False, "exited", False),
    (([None], [[0]]), False, "hang", True),
    (([[0, 1]], [[1, 0]]), False, "exited", False),  # the partner's side of the same pair
])  # fmt: skip
def test_groups_that_are_made_apart(lists: tuple[list[Any], list[Any]], local: bool, reason: str, fires: bool) -> None:
    ranks = [recording([event("new_group", line=30, ranks=told, local=local) for told in mine], rank=r) for r, mine in enumerate(lists)]
    of = run(ranks) if reason == "exited" else hung(*ranks)
    found = findings(GroupsMadeApart, of)
    assert len(found) == fires
    if fires:
        assert found[0].where is not None and found[0].where.line == 30
        assert found[0].severity is (Severity.WARNING if reason == "exited" else Severity.ERROR)
