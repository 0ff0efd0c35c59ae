"""Findings on Slurm runs, on recordings and node facts made by hand: each fires on its cause and is silent beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.checks.base import NotApplicable
from harness.checks.engine import fold
from harness.checks.hng.hang import Hang
from harness.checks.hng.host_cut_off import HostCutOff, cut_off
from harness.checks.lau.host_name import HostName
from harness.checks.lau.job_ended_from_outside import JobEndedFromOutside
from harness.checks.lau.job_layout import JobLayout
from harness.checks.lau.node_failed import NodeFailed
from harness.checks.lau.out_of_memory_kill import OutOfMemoryKill
from harness.checks.lau.pending_too_long import PendingTooLong
from harness.checks.lau.rank_failed import RankFailed
from harness.checks.lau.requeued import Requeued
from harness.checks.lau.run_folder_not_shared import RunFolderNotShared
from harness.checks.lau.submission_rejected import SubmissionRejected
from harness.checks.lau.wall_limit import WallLimit
from harness.model import Ending, RankExit, Scheduler, Slurm
from harness.record import Run
from tests.unit.checks.builder import event, findings, recording, row, run

ALL = (SubmissionRejected, PendingTooLong, NodeFailed, JobEndedFromOutside, JobLayout, HostName, Requeued, RunFolderNotShared, HostCutOff)
CLOSED = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"


def node(number: int, **more: Any) -> dict[str, Any]:
    facts = {"ntasks": "2", "nnodes": "2", "tasks_per_node": "1(x2)"}
    name = f"n{number + 1}"
    return {"node": name, "host": name, "addresses": [f"10.0.0.{number + 1}"], "ip": f"10.0.0.{number + 1}", "interfaces": ["lo", "ib0"], "pinned": {},
            "slurm": facts} | more  # fmt: skip


def job(
    state: str = "COMPLETED", *, exits: tuple[tuple[int, int, bool], ...] = ((0, 0, False), (1, 0, False)), reason: str = "exited",
    nodes: list[dict[str, Any]] | None = None, events: tuple[Any, ...] = ((), ()), plan: dict[str, Any] | None = None, **scheduler: Any,
) -> Run:  # fmt: skip
    """Two nodes of one rank each. `exits`: (rank, code, by us)."""
    recordings = [recording(events[r], [row(s) for s in range(12)], rank=r, host=f"n{r + 1}") for r in range(2)]
    made = run(recordings, nproc=1, nodes=2, launcher="slurm", slurm=Slurm(), **(plan or {}))
    told = tuple(RankExit(r, 1000 + r, code, 5, by_us) for r, code, by_us in exits)
    made.ending = Ending(reason, True, told, scheduler=Scheduler("77", state, nodes="n[1-2]", **scheduler))
    made.nodes = [node(0), node(1)] if nodes is None else nodes
    return made


def said(check: Any, of: Run) -> list[str]:
    return [f.message for f in findings(check, of)]


def test_a_healthy_job_has_no_finding() -> None:
    assert [said(check, job()) for check in ALL] == [[]] * len(ALL)


@pytest.mark.parametrize("check", ALL, ids=lambda c: c.code)
def test_a_run_without_slurm_is_not_applicable(check: Any) -> None:
    with pytest.raises(NotApplicable):
        list(check().end(run([recording(rank=0)])))
    live = job()
    live.live = True
    with pytest.raises(NotApplicable):
        list(check().end(live))


def test_what_sbatch_said_is_told_with_the_way_out() -> None:
    found = findings(SubmissionRejected, job(reason="launch-failed", rejected="Invalid partition name specified", plan={}))
    assert found[0].message == "Slurm took no job: Invalid partition name specified" and "sinfo" in found[0].help


def test_waiting_too_long_names_slurms_reason() -> None:
    found = findings(PendingTooLong, _pending("ReqNodeNotAvail, UnavailableNodes:n17"))
    assert found[0].message.startswith("the job waited 61 s without being started, and was cancelled: ReqNodeNotAvail")
    assert "nodelist" in found[0].help
    assert said(PendingTooLong, job("CANCELLED", reason="interrupted")) == []


def _pending(why: str) -> Run:
    made = job("CANCELLED", reason="pending", exits=())
    assert made.ending.scheduler is not None
    made.ending = replace(made.ending, started=False, scheduler=replace(made.ending.scheduler, reason=why, pending_s=61.4))
    return made


def test_a_crashed_node_is_named_with_the_ranks_it_took_along() -> None:
    crashed = job("NODE_FAIL", reason="scheduler", exits=((0, -15, True),))
    found = findings(NodeFailed, crashed)
    assert found[0].message == "a node failed under the job: n2; rank 1 went with it" and found[0].ranks == (1,)
    assert said(JobEndedFromOutside, crashed) == []


def test_a_node_that_did_not_boot() -> None:
    made = job("BOOT_FAIL", reason="scheduler", exits=((0, -15, True), (1, -15, True)))
    assert said(NodeFailed, made) == ["a node did not boot; no rank had been started on it"]


def test_victims_of_a_crashed_node_are_folded_under_it() -> None:
    failed = event("failure", type="RuntimeError", message=CLOSED, line=3, op="", phase="train", trace="")
    made = job("NODE_FAIL", reason="scheduler", exits=((0, 1, False),), events=((failed,), ()))
    kept = fold([*findings(NodeFailed, made), *findings(RankFailed, made)])
    assert [f.code for f in kept] == ["LAU133"] and kept[0].consequences == ("LAU101",)


@pytest.mark.parametrize("state", ["CANCELLED", "PREEMPTED", "REVOKED"])
def test_an_end_from_outside_is_told(state: str) -> None:
    made = job(state, reason="scheduler", exits=((0, -15, True), (1, -15, True)))
    found = findings(JobEndedFromOutside, made)
    assert found[0].message == f"the job was ended from outside: {state}" and "12 steps" in found[0].notes[1]


@pytest.mark.parametrize("reason", ["interrupted", "hang", "timeout", "fail-fast"])
def test_our_own_cancel_is_none(reason: str) -> None:
    assert said(JobEndedFromOutside, job("CANCELLED", reason=reason)) == []


def test_slurms_limits_are_the_wall_limit() -> None:
    assert said(WallLimit, job("TIMEOUT", reason="timeout")) == ["Slurm ended the job at its time limit (TIMEOUT)"]
    assert said(WallLimit, job("DEADLINE", reason="timeout")) == ["Slurm ended the job at its deadline (DEADLINE)"]
    assert said(WallLimit, job("CANCELLED", reason="timeout")) == ["the run was ended after its limit of 600 s"]


def test_out_of_memory_names_the_rank_or_says_that_nobody_knows() -> None:
    made = job("OUT_OF_MEMORY", exits=((0, -15, True), (1, -9, False)))
    assert said(OutOfMemoryKill, made) == ["rank 1 was killed by the kernel because memory ran out"]
    unknown = job("OUT_OF_MEMORY", exits=())
    assert "which rank it was is not in the recording" in said(OutOfMemoryKill, unknown)[0]
    assert said(OutOfMemoryKill, job("FAILED", exits=((0, -15, True), (1, -9, False)))) == []


def test_a_layout_that_is_not_the_planned_one() -> None:
    facts = {"ntasks": "4", "nnodes": "2", "tasks_per_node": "2(x2)"}
    made = job(nodes=[node(0, slurm=facts), node(1, slurm=facts)])
    assert said(JobLayout, made) == ["Slurm started 4 tasks on 2 nodes, planned were 2 on 2"]
    alone = {"ntasks": "1", "nnodes": "1", "tasks_per_node": "1"}
    assert said(JobLayout, job(nodes=[node(0, slurm=alone)])) == ["Slurm started 1 tasks on 1 nodes, planned were 2 on 2"]
    packed = job(nodes=[node(0), node(1, node="n1")])
    assert said(JobLayout, packed) == ["2 tasks of 2 nodes ran on n1 alone"]


def test_a_host_name_that_leads_nowhere_is_told_where_the_ranks_did_not_meet() -> None:
    fell = ((0, 1, False), (1, 1, False))
    assert said(HostName, job(exits=fell, nodes=[node(0), node(1, addresses=[])])) == ["the host name n2 does not resolve"]
    loop = job(exits=fell, nodes=[node(0), node(1, addresses=["127.0.1.1"])])
    found = findings(HostName, loop)
    assert found[0].message == "the host name n2 resolves to 127.0.1.1, where no other node finds it" and "ib0" in found[0].help
    pinned = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert said(HostName, job(exits=fell, nodes=[node(0), node(1, addresses=["127.0.1.1"], pinned=pinned)])) == []
    dev = [node(n, addresses=[f"127.77.0.{n}"], ip="127.0.0.1") for n in range(2)]
    assert said(HostName, job(exits=fell, nodes=dev)) == []  # all nodes are this machine: loopback is right
    assert said(HostName, job(nodes=[node(0), node(1, addresses=[])])) == []  # they met all the same


def silent(*ips: str) -> list[dict[str, Any]]:
    return [{"ip": ip, "retransmissions": 5, "num_bytes": 96} for ip in ips]


def test_a_host_that_no_other_hears_is_named_with_its_ranks() -> None:
    nodes = [node(0, silent=silent("10.0.0.2")), node(1, silent=silent("10.0.0.1", "10.0.0.3")), node(2, silent=silent("10.0.0.2", "192.0.2.9"))]
    of = job(reason="hang", exits=((0, -15, True), (1, -15, True)), nodes=nodes)
    (found,) = findings(HostCutOff, of)
    assert (found.message, found.ranks) == ("host n2 no longer answers the others", (1,))
    assert found.notes[0] == "n2 has not acknowledged 96 bytes from n1, sent 5 times more"


def test_two_hosts_that_do_not_hear_each_other_are_both_named() -> None:
    made = job(reason="hang", exits=((0, -15, True), (1, -15, True)), nodes=[node(0), node(1, silent=silent("10.0.0.1"))])
    (found,) = findings(HostCutOff, made)
    assert (found.message, found.ranks) == ("hosts n1 and n2 no longer reach each other", (0, 1))
    assert said(HostCutOff, job(reason="hang", nodes=[node(0, silent=[3, {}]), node(1, silent="x")])) == []  # a forged line


def test_a_hang_is_folded_under_the_host_and_the_host_under_the_failed_node() -> None:
    nodes = [node(0, silent=silent("10.0.0.2")), node(1)]
    hung = job(reason="hang", exits=((0, -15, True), (1, -15, True)), nodes=nodes)
    assert [f.code for f in fold([*findings(HostCutOff, hung), *findings(Hang, hung)])] == ["HNG107"]
    failed = job("NODE_FAIL", reason="scheduler", exits=((0, -15, True),), nodes=nodes)
    assert [f.code for f in fold([*findings(HostCutOff, failed), *findings(NodeFailed, failed)])] == ["LAU133"]


@pytest.mark.parametrize(
    ("apart", "hosts"),
    [
        ("ab", ["a", "b"]),
        ("ab ac ad", ["a"]),
        ("ab cd", ["a", "b", "c", "d"]),
        ("ac ad bc bd", ["a", "b"]),
        ("ab ac bc", ["a", "b", "c"]),
        ("", []),
    ],
)
def test_the_fewest_hosts_that_explain_the_silence(apart: str, hosts: list[str]) -> None:
    assert cut_off({frozenset(pair) for pair in apart.split()}) == hosts


def test_a_requeued_job_is_an_advice() -> None:
    found = findings(Requeued, job(attempt=2))
    assert found[0].message == "the job was requeued 2 times; attempt 3 is the one that was judged" and found[0].severity.word == "advice"


def test_a_folder_that_not_all_nodes_share() -> None:
    made = job("FAILED", nodes=[node(0)], exits=())
    assert said(RunFolderNotShared, made) == ["1 of 2 tasks left no word in the run folder: it is not the same folder on every node"]
    assert said(RunFolderNotShared, job("FAILED", exits=((0, 1, False), (1, -15, True)))) == []
    none = job("FAILED", nodes=[], exits=(), reason="launch-failed")
    none.ending = replace(none.ending, launcher_error="job 77 ended as FAILED before a rank was started")
    assert said(RunFolderNotShared, none) == ["2 of 2 tasks left no word in the run folder: it is not the same folder on every node"]
    none.ending = replace(none.ending, launcher_error="job 77 ended as FAILED before a rank was started\nmodule: command not found")
    assert said(RunFolderNotShared, none) == []
    assert said(RunFolderNotShared, job("NODE_FAIL", nodes=[node(0)], reason="scheduler")) == []
