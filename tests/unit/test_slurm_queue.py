"""How Slurm is asked about a job: by its own commands, here small scripts that answer as they do."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness.launch import slurm_queue
from harness.launch.slurm import Job
from harness.launch.slurm_queue import GONE, Inquiry, JobState

FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name: str, shell: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{shell}\n")
        (tmp_path / name).chmod(0o755)

    return make


def answer(inquiry: Inquiry, limit_s: float = 10.0) -> JobState:
    until = time.monotonic() + limit_s
    while (state := inquiry.poll(pressing=True)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    return state


def test_scontrol_is_asked_and_accounting_only_where_it_has_forgotten_the_job(says: object) -> None:
    says("scontrol", "echo 'JobId=7 JobState=TIMEOUT Reason=TimeLimit Restarts=1 NodeList=n1'")  # type: ignore[operator]
    says("sacct", "echo 'COMPLETED|n1'")  # type: ignore[operator]
    assert answer(Inquiry("7")) == JobState("TIMEOUT", "TimeLimit", "n1", 1)
    says("scontrol", FORGOTTEN)  # type: ignore[operator]
    assert answer(Inquiry("7")) == JobState("COMPLETED", "", "n1")


@pytest.mark.parametrize("sacct", ["exit 1", "echo 'RUNNING|n1'", "echo", "echo nonsense"])
def test_a_job_that_nobody_knows_is_gone(says: object, sacct: str) -> None:
    """Without accounts, and where they hold a job to be running that slurmctld knows nothing of."""
    says("scontrol", FORGOTTEN)  # type: ignore[operator]
    says("sacct", sacct)  # type: ignore[operator]
    assert answer(Inquiry("7")).state == GONE


def test_a_job_is_gone_where_there_is_no_sacct_to_ask(says: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says("scontrol", FORGOTTEN)  # type: ignore[operator]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert answer(Inquiry("7")).state == GONE


def test_a_client_that_hangs_is_ended_and_asked_again(says: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_queue, "CLIENT_LIMIT_S", 0.3)
    says("scontrol", f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; exec sleep 600; }}; echo 'JobId=7 JobState=RUNNING Reason=None'")  # type: ignore[operator]
    assert answer(Inquiry("7")).state == "RUNNING"


@pytest.mark.parametrize("folder", ["/a b/slurm", "/a b/slurm2", ""])
def test_a_later_job_of_the_same_number_is_another(says: object, folder: str) -> None:
    says("scontrol", "echo 'JobId=7 JobState=RUNNING Reason=None WorkDir=/a b/slurm StdErr=x'")  # type: ignore[operator]
    assert answer(Inquiry("7", folder)).state == (GONE if folder == "/a b/slurm2" else "RUNNING")
    says("scontrol", FORGOTTEN)  # type: ignore[operator]
    says("sacct", "echo 'FAILED|n1|/a b/slurm'")  # type: ignore[operator]
    assert answer(Inquiry("7", folder)).state == (GONE if folder == "/a b/slurm2" else "FAILED")


def test_a_job_that_is_not_ours_is_not_cancelled(says: object, tmp_path: Path) -> None:
    says("scancel", f"echo $1 >> {tmp_path}/cancelled")  # type: ignore[operator]
    says("scontrol", "echo 'JobId=7 JobState=RUNNING Reason=None WorkDir=/theirs StdErr=x'")  # type: ignore[operator]
    job = Job("7", "/ours")
    assert not job.cancel()  # nothing is known of it yet
    while job.poll(pressing=True) is None:
        time.sleep(0.01)
    assert not job.cancel() and not (tmp_path / "cancelled").exists()
    ours = Job("8")
    assert ours.cancel() and ours.scancel is not None
    ours.scancel.wait(20)
    assert (tmp_path / "cancelled").read_text() == "8\n"
