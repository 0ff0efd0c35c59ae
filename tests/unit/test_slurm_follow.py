"""What is read of a job: Slurm's own words, and the files of its nodes. Needs no Slurm."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import attempt, mounts
from harness.launch import slurm, slurm_meet, slurm_shared
from harness.launch.slurm_follow import Follower, ending_of
from harness.launch.slurm_queue import JobState, parse_sacct, parse_scontrol
from harness.model import Plan, Scenario, Slurm
from harness.report import verdict
from harness.watch.pulses import Pulses

PLAN = Plan("abc", Scenario("train", "train.py"), (), 1, nodes=2, launcher="slurm", slurm=Slurm())

SCONTROL = (
    "JobId=5834855 JobName=harness-x UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=1 Nice=0 Account=(null) QOS=(null) "
    "JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 ExitCode=0:0 "
    "RunTime=00:00:26 TimeLimit=00:10:00 NodeList={nodes} BatchHost=n1 Comment=JobState=FAKE\n"
)


def test_scontrol_is_read() -> None:
    text = SCONTROL.format(state="RUNNING", reason="None", restarts=2, nodes="n[1-2]")
    assert parse_scontrol(text.replace("Comment=JobState=FAKE", "")) == JobState("RUNNING", "", "n[1-2]", 2)
    pending = parse_scontrol(SCONTROL.replace("Comment=JobState=FAKE", "").format(state="PENDING", reason="Resources", restarts=0, nodes="(null)"))
    assert pending == JobState("PENDING", "Resources", "", 0) and pending.waits and not pending.ended
    assert parse_scontrol("slurm_load_jobs error: Invalid job id specified\n") is None


@pytest.mark.parametrize("state", ["TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED", "PREEMPTED", "DEADLINE", "BOOT_FAIL", "FAILED", "COMPLETED"])
def test_these_states_are_ends(state: str) -> None:
    assert JobState(state).ended and not JobState(state).waits


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING", "SUSPENDED", "PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_HOLD", "EXPEDITING", "?"])
def test_these_are_not(state: str) -> None:
    assert not JobState(state).ended


def test_sacct_is_read() -> None:
    assert parse_sacct("CANCELLED by 1000|n1\n") == JobState("CANCELLED", "by 1000", "n1")
    assert parse_sacct("\n") is None


# ---- the files of the nodes


def tell(folder: Path, agent: int, *events: dict[str, Any]) -> None:
    with open(folder / attempt.NODES_DIR / f"{agent}.jsonl", "a") as file:
        for event in events:
            file.write(json.dumps(event) + "\n")


def hello(agent: int, **more: Any) -> dict[str, Any]:
    return {"ev": "hello", "node": f"n{agent + 1}", "host": f"n{agent + 1}", **more}


def rank(number: int) -> dict[str, Any]:
    return {"ev": "rank", "rank": number, "local_rank": 0, "pid": 100 + number, "ticks": 1}


def ended(number: int, code: int = 0, by_us: bool = False) -> dict[str, Any]:
    return {"rank": number, "pid": 100 + number, "code": code, "time_ns": number + 1, "by_us": by_us}


def ending(*exits: dict[str, Any], reason: str = "exited", error: str = "", left: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "ev": "ending", "reason": reason, "started": bool(exits), "exits": list(exits), "left_behind": list(left), "launcher_error": error,
        "wall_s": 2.0,
    }  # fmt: skip


class Carried:
    """A job of which Slurm says what the test wants."""

    job_id = "77"

    def __init__(self, *states: JobState) -> None:
        self.states = list(states)
        self.cancelled = 0

    def poll(self, pressing: bool) -> JobState | None:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0] if self.states else None

    def cancel(self) -> bool:
        self.cancelled += 1
        return True


def handle(run_dir: Path, *states: JobState) -> tuple[slurm.SlurmHandle, Carried]:
    carrier = Carried(*states)
    return slurm.SlurmHandle(PLAN, run_dir, carrier), carrier  # type: ignore[arg-type]


RUNNING, COMPLETED = JobState("RUNNING", nodes="n[1-2]"), JobState("COMPLETED", nodes="n[1-2]")


def test_a_clean_run_ends_when_all_nodes_say_so_whatever_slurm_says(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    one, _ = handle(tmp_path, RUNNING)
    assert one.poll() is None and one.queued == ""
    tell(tmp_path, 0, hello(0), rank(0), ending(ended(0)))
    assert one.poll() is None
    tell(tmp_path, 1, hello(1), rank(1), ending(ended(1)))
    told = one.poll()
    assert told is not None and (told.reason, told.started, [e.code for e in told.exits]) == ("exited", True, [0, 0])
    assert told.scheduler is not None and told.scheduler.job_id == "77"


def test_why_it_waits_is_said(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    one, _ = handle(tmp_path, JobState("PENDING", "Resources"))
    one.poll()
    assert one.queued == "job 77 is pending: Resources"


def test_what_slurm_ended_bears_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "LATE_S", 0.0)
    for state, reason in (("TIMEOUT", "timeout"), ("CANCELLED", "scheduler"), ("NODE_FAIL", "scheduler"), ("OUT_OF_MEMORY", "exited")):
        folder = tmp_path / state
        attempt.make(folder, 0)
        tell(folder, 0, hello(0), rank(0), ending(ended(0, -15, True), reason="slurm"))
        tell(folder, 1, hello(1), rank(1))
        one, _ = handle(folder, JobState(state, nodes="n[1-2]"))
        one.poll()
        told = one.poll()
        assert told is not None and told.scheduler is not None
        assert (told.reason, told.scheduler.state, [e.rank for e in told.exits]) == (reason, state, [0])


def test_a_node_whose_supervisor_was_killed_is_named_and_its_ranks_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm says FAILED, and no rank failed by itself as far as anybody told: never a good end."""
    monkeypatch.setattr(slurm, "LATE_S", 0.0)
    attempt.make(tmp_path, 0)
    tell(tmp_path, 0, hello(0), rank(0), ending(ended(0, -15, True), reason="slurm"))
    tell(tmp_path, 1, hello(1), rank(1))
    one, _ = handle(tmp_path, JobState("FAILED", "NonZeroExitCode", nodes="n[1-2]"))
    one.poll()
    told = one.poll()
    assert told is not None and told.reason == "exited"
    assert told.launcher_error == "the supervisor on n2 went away without a word, and Slurm says FAILED; rank 1 went with it"
    assert verdict.failed(told)


@pytest.mark.parametrize("state", ["COMPLETED", "OUT_OF_MEMORY"])
def test_a_job_that_completed_or_has_a_finding_of_its_own_has_no_lost_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """A node whose last words a full disk swallowed ended well, says Slurm."""
    monkeypatch.setattr(slurm, "LATE_S", 0.0)
    attempt.make(tmp_path, 0)
    tell(tmp_path, 0, hello(0), rank(0), ending(ended(0)))
    tell(tmp_path, 1, hello(1), rank(1))
    one, _ = handle(tmp_path, JobState(state, nodes="n[1-2]"))
    one.poll()
    told = one.poll()
    assert told is not None and told.launcher_error == ""


def test_an_earlier_attempt_is_forgotten(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    tell(tmp_path, 0, hello(0), rank(0), ending(ended(0)))
    one, _ = handle(tmp_path, RUNNING, replace(RUNNING, state="PENDING", restarts=1), replace(RUNNING, restarts=1))
    one.poll()
    assert one.pids == {0: 100}
    one.poll()
    assert (one.attempt, one.pids) == (1, {}) and one.queued.startswith("job 77 is pending")
    second = attempt.make(tmp_path, 1)
    tell(tmp_path, 1, hello(1), rank(1), ending(ended(1)))  # a straggler of the first attempt
    tell(second, 0, hello(0), rank(0), ending(ended(0)))
    assert one.poll() is None
    tell(second, 1, hello(1), rank(1), ending(ended(1)))
    told = one.poll()
    assert told is not None and told.scheduler is not None and told.scheduler.attempt == 1


def test_a_stop_goes_by_the_control_file_and_by_scancel_where_nothing_runs(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    one, carrier = handle(tmp_path, JobState("PENDING", "Priority"))
    one.poll()
    one.stop("pending")
    assert carrier.cancelled == 1
    other = tmp_path / "b"
    attempt.make(other, 0)
    tell(other, 0, hello(0), rank(0))
    two, carrier = handle(other, RUNNING)
    two.poll()
    two.stop("hang")
    assert carrier.cancelled == 0 and attempt.read_note(other / attempt.CONTROL) == "stop hang\n"


def test_a_run_that_we_end_is_not_followed_into_the_queue(tmp_path: Path) -> None:
    """A host that is cut off makes a hang, and half a minute later Slurm requeues the job: we may be in the middle of ending it."""
    attempt.make(tmp_path, 0)
    tell(tmp_path, 0, hello(0), rank(0))
    tell(tmp_path, 1, hello(1), rank(1))
    one, carrier = handle(tmp_path, RUNNING, JobState("PENDING", "BeginTime", restarts=1))
    one.poll()
    one.stop("hang")
    assert one.poll() is None and (one.attempt, carrier.cancelled) == (0, 1)
    for number in (0, 1):
        tell(tmp_path, number, ending(ended(number, -15, True), reason="hang"))
    told = one.poll()
    assert told is not None and told.scheduler is not None
    assert (told.reason, told.scheduler.attempt, [e.rank for e in told.exits]) == ("hang", 0, [0, 1])


@pytest.mark.parametrize("state", [None, JobState("PENDING", "Resources"), RUNNING])
def test_who_wants_to_go_is_not_kept_by_a_slurm_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: JobState | None) -> None:
    """slurmctld is away, or its nodes are gone with it: the last that was heard stays true for ever."""
    attempt.make(tmp_path, 0)
    run, _ = handle(tmp_path, *([] if state is None else [state]))
    assert run.poll() is None
    run.stop("interrupted")
    assert run.poll() is None
    monkeypatch.setattr(slurm, "GIVE_UP_S", -slurm.CANCEL_AFTER_S - PLAN.grace_s - 1)
    told = run.poll()
    assert told is not None and told.left_behind == ("job 77, of whose end neither Slurm nor its nodes have told: squeue -j 77; scancel 77",)


def test_a_run_whose_nodes_have_all_told_waits_for_slurms_word_and_cannot_hang(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    run, _ = handle(tmp_path, RUNNING)
    tell(tmp_path, 0, hello(0), rank(0), ending(ended(0, 1)))
    run.poll()
    assert not run.settling
    tell(tmp_path, 1, hello(1), rank(1), ending(ended(1, -15, True), reason="peer"))
    assert run.poll() is None and run.settling


def test_what_never_ran_says_what_the_job_said(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "job-77.log").write_text("module: command not found\n")
    one, _ = handle(tmp_path, JobState("FAILED"))
    slurm_late, slurm.LATE_S = slurm.LATE_S, 0.0
    try:
        one.poll()
        told = one.poll()
    finally:
        slurm.LATE_S = slurm_late
    assert told is not None and (told.reason, told.started) == ("launch-failed", False)
    assert told.launcher_error == "job 77 ended as FAILED before a rank was started\nmodule: command not found"


def test_a_failed_rank_explains_its_launcher_and_hosts_are_named(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    tell(tmp_path, 0, hello(0), rank(0), ending(ended(0, 1), error="torchrun ended with exit code 1"))
    tell(tmp_path, 1, hello(1), rank(1), ending(ended(1, -15, True), reason="peer", left=("/dev/shm/x was left behind",)))
    told = ending_of(Follower(tmp_path).poll(), 1.0)
    assert (told.reason, told.launcher_error, told.left_behind) == ("exited", "", ("n2: /dev/shm/x was left behind",))


def test_out_of_memory_is_told_by_the_node_whose_rank_was_killed(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    tell(tmp_path, 0, rank(0), {**ending(ended(0, 1)), "oom_kills": 5})
    tell(tmp_path, 1, rank(1), {**ending(ended(1, -9)), "oom_kills": 1})
    assert ending_of(Follower(tmp_path).poll(), 1.0).oom_kills == 1


def test_an_ending_that_is_none_is_not_taken(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    tell(tmp_path, 0, rank(0), {**ending(ended(0)), "wall_s": "x"}, {"ev": "ending"}, {**ending(ended(0)), "oom_kills": []})
    account = Follower(tmp_path).poll()
    assert account.endings == {} and ending_of(account, 1.0).reason == "exited"


def test_a_half_written_line_waits_and_garbage_is_skipped(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    follower = Follower(tmp_path)
    path = tmp_path / "nodes" / "0.jsonl"
    path.write_text('{"ev": "hello", "node"')
    assert follower.poll().hellos == {}
    with path.open("a") as file:
        file.write(': "n1"}\nnot json\n{"ev": "rank"}\n[1]\n' + json.dumps(rank(3)) + "\n")
    account = follower.poll()
    assert account.hellos[0]["node"] == "n1" and account.pids == {3: 103}


def test_links_are_not_followed(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    (tmp_path / "secret").write_text(json.dumps(rank(0)) + "\n")
    (tmp_path / "nodes" / "0.jsonl").symlink_to(tmp_path / "secret")
    assert Follower(tmp_path).poll().pids == {}
    (tmp_path / "note").symlink_to(tmp_path / "secret")
    assert attempt.read_note(tmp_path / "note") == ""


def test_the_newest_attempt_is_one_that_has_a_folder(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    attempt.make(tmp_path, 2)
    (tmp_path / "attempt-9").write_text("")
    assert attempt.newest(tmp_path) == 2


# ---- meeting and pulses


def test_ports_follow_from_the_job_and_are_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(slurm_meet.candidates("77", 0))
    assert first == list(slurm_meet.candidates("77", 0)) and first != list(slurm_meet.candidates("78", 0)) != list(slurm_meet.candidates("77", 1))
    assert all(20_000 <= port < 32_000 for port in first) and len(set(first)) == len(first)
    monkeypatch.setattr(slurm_meet, "is_free", lambda port: port != first[0])
    assert slurm_meet.free_port("77", 0) == first[1] and slurm_meet.free_port("77", 0, skip=1) == first[2]


def test_the_meeting_point_passes_through_the_folder(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    assert slurm_meet.published(tmp_path) is None
    made = slurm_meet.publish(tmp_path, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "no.such.host.invalid"}, 0)
    assert slurm_meet.wait_for(tmp_path, 1.0) == made
    assert made.host != "no.such.host.invalid"


def test_a_process_lives_while_its_node_lists_it(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    pulses = Pulses(tmp_path)
    pulses.look()
    assert pulses.lives("1-50-9")  # not listed yet: it has only just begun
    path = tmp_path / "nodes" / "1.pulse"
    attempt.write_note(path, json.dumps({"beat": 1, "cpu_s": {"50-9": 1.5}, "gpu": [50]}))
    pulses.look()
    assert pulses.lives("1-50-9") and pulses.cpu_s("1-50-9") == 1.5 and pulses.holds_gpu("1-50-9") and not pulses.holds_gpu("0-50-9")
    attempt.write_note(path, json.dumps({"beat": 2, "cpu_s": {}}))
    pulses.look()
    assert not pulses.lives("1-50-9")
    os.unlink(path)  # noqa: PTH108


# ---- what can be known before a submission

def test_a_local_folder_is_a_doubt_unless_the_nodes_are_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "file_system_of", lambda folder: "tmpfs")
    monkeypatch.setattr(slurm_shared, "node_addresses", lambda: ["n1", "n2"])
    assert "which no other machine sees" in slurm_shared.doubt(tmp_path)
    monkeypatch.setattr(slurm_shared, "node_addresses", lambda: ["127.77.1.11", "127.77.1.12"])
    assert slurm_shared.doubt(tmp_path) == ""
    monkeypatch.setattr(slurm_shared, "node_addresses", list)
    monkeypatch.setattr(mounts, "file_system_of", lambda folder: "lustre")
    assert slurm_shared.doubt(tmp_path) == ""
