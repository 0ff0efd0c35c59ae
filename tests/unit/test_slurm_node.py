"""The supervisor of a node, without processes: what it starts, when it tries another port, when it leaves. Needs no Slurm."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import attempt
from harness.launch import job as wire
from harness.launch import slurm_node, supervisor
from harness.launch.command import Place
from harness.launch.rank_shim import RANK_PREFIX
from harness.launch.slurm_meet import Endpoint
from harness.launch.slurm_node import Node
from harness.model import Plan, Scenario, Slurm
from harness.probe import protocol

PLAN = Plan("abc", Scenario("train", "train.py"), ("--lr", "1"), 2, nodes=2, launcher="slurm", slurm=Slurm(), python="/py")
CLEAN = {"reason": "exited", "started": True, "exits": [{"rank": 0, "code": 0, "by_us": False}], "left_behind": [], "launcher_error": "", "wall_s": 1.0}
FAILED = {**CLEAN, "reason": "launch-failed", "started": False, "exits": [], "launcher_error": "the launcher ended with exit code 1"}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes nodes that watch nothing and take no signal."""
    made: list[Node] = []
    monkeypatch.setattr(supervisor, "_wake_on_signals", lambda: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(Node, "_watch", lambda self, descriptor, call: None)

    def make(plan: Plan = PLAN, **env: str) -> Node:
        for name, value in {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "77", **env}.items():
            monkeypatch.setenv(name, value)
        made.append(Node(tmp_path, plan))
        monkeypatch.setattr(made[-1], "launch", lambda number=0: launched.append(number))
        return made[-1]

    launched: list[int] = []
    make.launched = launched  # type: ignore[attr-defined]
    yield make
    for one in made:
        one.close()
        os.close(one._wakeup)


def told(folder: Path, agent: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "nodes" / f"{agent}.jsonl").read_text().splitlines()]


def test_it_says_who_it_is_before_it_starts_anything(node: Any, tmp_path: Path) -> None:
    node(SLURM_NTASKS="2", SLURM_NNODES="2")
    (hello,) = told(tmp_path)
    assert (hello["ev"], hello["attempt"], hello["slurm"]["ntasks"]) == ("hello", 0, "2")


def test_a_requeued_job_writes_elsewhere(node: Any, tmp_path: Path) -> None:
    node(SLURM_RESTART_COUNT="1")
    assert told(tmp_path / "attempt-1")[0]["attempt"] == 1 and not (tmp_path / "nodes").exists()


def test_one_rank_a_task_takes_its_world_from_slurm(node: Any) -> None:
    plan = replace(PLAN, slurm=Slurm(ranks="task"))
    one = node(plan, SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NODEID="1")
    command = one._command(plan, Place("n1:2345", "n2", is_host=False))
    rank = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "2345"}
    assert {name: command.env[name] for name in rank} == rank
    assert command.argv[-4:] == ("-u", "train.py", "--lr", "1")
    assert command.env[RANK_PREFIX + protocol.ENV_NODE] == "3"


def test_a_gpu_of_its_own_is_device_0(node: Any) -> None:
    plan = replace(PLAN, device="cuda", slurm=Slurm(ranks="task", gpus="task"))
    command = node(plan, SLURM_PROCID="3", SLURM_LOCALID="1")._command(plan, Place("n1:2345", "n2"))
    assert (command.env["LOCAL_RANK"], command.env["LOCAL_WORLD_SIZE"], command.env["RANK"]) == ("0", "1", "3")


def test_agents_meet_at_the_endpoint(node: Any) -> None:
    command = node()._command(PLAN, Place("n1:2345", "n1", is_host=True))
    argv = command.fallback.argv if command.fallback is not None else command.argv
    options = dict(itertools.pairwise(argv))
    assert (options["--rdzv-endpoint"], options["--rdzv-conf"], options["--local-addr"], options["--nnodes"]) == ("n1:2345", "is_host=1", "n1", "2")


def test_a_port_that_was_taken_after_all_is_another_try(node: Any, tmp_path: Path) -> None:
    one = node()
    one._endpoint = Endpoint("n1", "10.0.0.1", 2345, 0)
    log = one.private / "logs" / "agent.log"
    log.parent.mkdir()
    log.write_text("name: EADDRINUSE\n" + "a long traceback\n" * 40)
    one._tell({"ev": wire.ENDING, **FAILED})
    assert [event["ev"] for event in told(tmp_path)] == ["hello"]  # that ending is nobody's business
    one._after(one.ending)
    assert node.launched == [1]
    one._endpoint = Endpoint("n1", "10.0.0.1", 2346, 1)
    assert not one._may_retry(FAILED)  # what the log said before is not said again


def test_other_agents_follow_to_the_new_port(node: Any) -> None:
    one = node(SLURM_PROCID="1")
    one._endpoint = Endpoint("n1", "10.0.0.1", 2345, 0)
    assert one._may_retry({**FAILED, "reason": slurm_node.RETRY})
    assert not one._may_retry({**CLEAN, "reason": slurm_node.RETRY})  # its ranks ran: too late
    one._endpoint = Endpoint("n1", "10.0.0.1", 2345, slurm_node.MAX_TRIES - 1)
    assert not one._may_retry({**FAILED, "reason": slurm_node.RETRY})


def test_a_failed_rank_is_told_to_the_other_nodes_and_the_task_waits_for_them(node: Any, tmp_path: Path) -> None:
    one = node()
    one._tell({"ev": wire.EXIT, "rank": 0, "pid": 1, "code": 1, "time_ns": 1, "by_us": False})
    assert attempt.read_note(tmp_path / "nodes" / "down") == "rank 0 on agent 0"
    one._tell({"ev": wire.ENDING, **CLEAN, "exits": [{"rank": 0, "code": 1, "by_us": False}]})
    one._after(one.ending)
    assert one.exit_code == 1 and not one._leaving
    with open(tmp_path / "nodes" / "1.jsonl", "w") as other:
        other.write(json.dumps({"ev": "ending", **CLEAN}) + "\n")
    one._after(one.ending)
    assert one._leaving


def test_a_rank_that_was_torn_down_is_not(node: Any, tmp_path: Path) -> None:
    node()._tell({"ev": wire.EXIT, "rank": 0, "pid": 1, "code": -15, "time_ns": 1, "by_us": True})
    assert attempt.read_note(tmp_path / "nodes" / "down") == ""


def test_after_a_clean_run_it_leaves_with_0(node: Any) -> None:
    one = node()
    one._tell({"ev": wire.ENDING, **CLEAN})
    one._after(one.ending)
    assert (one._leaving, one.exit_code) == (True, 0)


def test_agent_0_makes_the_reference_run_after_a_clean_one(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import rundir

    inner = tmp_path / "reference"
    inner.mkdir()
    rundir.write_plan(inner, replace(PLAN, run_id="abc-reference", nproc=1, nodes=1, slurm=None), [], {})
    started: list[Plan] = []
    monkeypatch.setattr(Node, "_start", lambda self, plan, command: started.append(plan))
    one, two = node(), node(SLURM_PROCID="1")
    for each in (two, one):
        each.ending = CLEAN
        each._after(CLEAN)
    assert [plan.run_id for plan in started] == ["abc-reference"] and two._leaving and not one._leaving
    assert (inner / "nodes" / "0.jsonl").exists()
    one._after({**CLEAN, "exits": [{"rank": 0, "code": 1, "by_us": False}]})
    assert (one._leaving, one.exit_code) == (True, 0)  # the run itself was well


class Stopped:
    """A gang as far as its end matters."""

    def __init__(self) -> None:
        self.reason = "exited"

    def members(self) -> list[Any]:
        return []

    def stop(self, reason: str, grace_s: float | None = None) -> None:
        self.reason = reason


def test_whom_the_ranks_do_not_hear_is_told_once_before_they_are_ended(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gang = node(), Stopped()
    silent = [{"ip": "10.0.0.2", "retransmissions": 5, "num_bytes": 9}]
    monkeypatch.setattr(slurm_node.silence, "silent_peers", lambda pids: silent if gang.reason == "exited" else [])
    one._gang = gang
    one._stop("hang")
    one._stop("hang")
    one._gang = None
    assert gang.reason == "hang" and [e["peers"] for e in told(tmp_path) if e["ev"] == "silent"] == [silent]


def test_a_full_disk_ends_nothing_and_is_caught_up_with(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, write = node(), os.write

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(attempt, "write_note", full)
        patched.setattr(os, "write", full)
        one._tell({"ev": wire.EXIT, "rank": 0, "pid": 1, "code": 1, "time_ns": 1, "by_us": False})
        one._each_turn()
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda fd, data: write(fd, data[:7]))  # a little room
        one._pulse._next = 0.0
        one._each_turn()
    assert [event["ev"] for event in told(tmp_path)] == ["hello", wire.EXIT]


def test_a_deleted_run_folder_ends_the_ranks(node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gang = node(), Stopped()
    monkeypatch.setattr(slurm_node.silence, "silent_peers", lambda pids: [])
    one._gang = gang
    one._look_around()
    assert gang.reason == "exited"
    one.run_dir = tmp_path / "gone"
    one._look_around()
    one._gang = None
    assert gang.reason == "folder-deleted"
