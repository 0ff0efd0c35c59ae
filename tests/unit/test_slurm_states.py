"""From the words that Slurm printed (22.05.8, recorded) to the finding: deadline, a node that went away, a node that did not boot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import attempt
from harness.checks.lau.job_ended_from_outside import JobEndedFromOutside
from harness.checks.lau.node_failed import NodeFailed
from harness.checks.lau.wall_limit import WallLimit
from harness.launch import slurm
from harness.launch.slurm_queue import JobState, parse_sacct, parse_scontrol
from harness.model import Ending, Plan, Scenario, Slurm
from tests.unit.checks.builder import findings, run

PLAN = Plan("abc", Scenario("train", "train.py"), (), 1, nodes=2, launcher="slurm", slurm=Slurm())
DEADLINE = (
    "JobId=5848412 JobName=wrap UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901758 Nice=0 Account=root QOS=normal JobState=DEADLINE "
    "Reason=DeadLine Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:1 RunTime=00:00:00 TimeLimit=00:01:00 TimeMin=N/A "
    "SubmitTime=2026-11-28T06:30:14 EligibleTime=2026-11-28T06:30:14 StartTime=2026-11-28T06:30:17 EndTime=2026-11-28T06:30:17 "
    "Deadline=2026-11-28T06:31:16 SuspendTime=None SecsPreSuspend=0 Scheduler=Main Partition=debug AllocNode:Sid=head:4176 ReqNodeList=n1 "
    "ExcNodeList=(null) NodeList= NumNodes=1 NumCPUs=8 NumTasks=N/A CPUs/Task=1 ReqB:S:C:T=0:0:*:* Command=(null) WorkDir=/tmp StdOut=/dev/null Power= \n"
)
NODE_FAIL = (  # a node in power save that did not come up in time
    "JobId=5848413 JobName=wrap UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901757 Nice=0 Account=root QOS=normal JobState=NODE_FAIL "
    "Reason=NodeDown Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:12 TimeLimit=UNLIMITED TimeMin=N/A "
    "SubmitTime=2026-11-28T06:30:22 EligibleTime=2026-11-28T06:30:22 StartTime=2026-11-28T06:30:25 EndTime=2026-11-28T06:30:37 Deadline=N/A "
    "Scheduler=Main Partition=debug AllocNode:Sid=head:4176 ReqNodeList=n3 ExcNodeList=(null) NodeList=n3 BatchHost=n3 NumNodes=1 NumCPUs=1 Power= \n"
)
BOOT_FAIL = NODE_FAIL.replace("JobState=NODE_FAIL", "JobState=BOOT_FAIL").replace("Reason=NodeDown", "Reason=JobLaunchFailure")  # as seen


class Said:
    """A job of which Slurm says this."""

    job_id = "77"

    def __init__(self, state: JobState) -> None:
        self.state = state

    def poll(self, pressing: bool) -> JobState:
        return self.state

    def cancel(self) -> None:
        """Nothing runs."""


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LATE_S", 0.0)


def ending(folder: Path, text: str) -> Ending:
    """Of a job that no node ever spoke of."""
    attempt.make(folder, 0)
    state = parse_scontrol(text)
    assert state is not None and state.ended
    handle = slurm.SlurmHandle(PLAN, folder, Said(state))  # type: ignore[arg-type]
    handle.poll()
    told = handle.poll()
    assert told is not None
    return told


def said(check: type, told: Ending) -> list[str]:
    made = run([], nproc=1, nodes=2, launcher="slurm", slurm=Slurm())
    made.ending = told
    return [finding.message for finding in findings(check, made)]


def test_a_deadline_is_a_wall_limit(tmp_path: Path) -> None:
    told = ending(tmp_path, DEADLINE)
    assert (told.reason, told.started, told.launcher_error) == ("timeout", False, "job 77 ended as DEADLINE before a rank was started")
    assert said(WallLimit, told) == ["Slurm ended the job at its deadline (DEADLINE)"]
    assert said(NodeFailed, told) == said(JobEndedFromOutside, told) == []


def test_sacct_of_that_job_names_no_node() -> None:
    assert parse_sacct("DEADLINE|None assigned\n") == JobState("DEADLINE", "", "")


@pytest.mark.parametrize(("text", "says"), [(NODE_FAIL, "a node failed under the job"), (BOOT_FAIL, "a node did not boot")])
def test_a_node_that_does_not_come_up_is_a_failed_node(tmp_path: Path, text: str, says: str) -> None:
    told = ending(tmp_path, text)
    assert told.scheduler is not None and told.scheduler.nodes == "n3"
    assert said(NodeFailed, told) == [f"{says}; no rank had been started on it"]
    assert said(JobEndedFromOutside, told) == said(WallLimit, told) == []
    assert said(JobEndedFromOutside, replace(told, scheduler=replace(told.scheduler, state="REVOKED"), reason="scheduler")) != []


def test_what_nobody_knows_any_more_is_not_taken_for_a_good_end(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    handle = slurm.SlurmHandle(PLAN, tmp_path, Said(JobState(slurm.GONE)))  # type: ignore[arg-type]
    handle.poll()
    told = handle.poll()
    assert told is not None and not told.started and told.launcher_error == "job 77 ended before a rank was started"
    assert attempt.read_note(tmp_path / attempt.CONTROL) == "stop scheduler\n"  # a node that lives on ends its ranks
