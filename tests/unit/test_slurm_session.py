"""The orchestrator on a queue, with a launcher that starts nothing: waiting, leaving, coming back, requeue, arrays. Needs no Slurm."""

from __future__ import annotations

import io
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from controller_samples import FAKES, FakeSupervisor, FakeWatch, exits, fake_judge, make_plan, write_recording

from harness import attempt, replay
from harness.model import Ending, Plan, Scenario, Scheduler, Slurm
from harness.planning import Job
from harness.queueing import shown
from harness.replay import Judging
from harness.report import json as report_json
from harness.report import junit
from harness.report.console import Style
from harness.report.live import Live
from harness.session import Session
from harness.settings import resolve


@pytest.fixture(autouse=True)
def fake_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.checks.engine.judge", fake_judge)
    monkeypatch.setattr("harness.checks.registry.all_checks", lambda: tuple(FAKES))
    monkeypatch.setattr("harness.queueing.ASK_S", 0.0)


class FakeJob:
    """A job that says at each poll what comes next: a queue's word, an attempt's number, or its ending."""

    fallback, job_id, settling = "", "77", False

    def __init__(self, *looks: Any) -> None:
        self.looks = list(looks)
        self.queued, self.attempt, self.pids, self.stopped = "", 0, dict[int, int](), ""
        self._take(self.looks[0])

    def _take(self, look: Any) -> Ending | None:
        if isinstance(look, Ending):
            return look
        self.queued = look if isinstance(look, str) else ""
        if isinstance(look, int):
            self.attempt, self.pids = look, {0: 1}
        return None

    def poll(self) -> Ending | None:
        if self.stopped:
            return Ending("exited", bool(self.pids), scheduler=Scheduler("77", "CANCELLED", attempt=self.attempt))
        return self._take(self.looks.pop(0) if len(self.looks) > 1 else self.looks[0])

    def stop(self, reason: str) -> None:
        self.stopped = reason


class FakeQueue:
    def __init__(self, *looks: Any) -> None:
        self.looks, self.submitted, self.handles = looks, list[list[Path]](), list[FakeJob]()
        self.closed = False

    def submit(self, runs: Any) -> None:
        self.submitted.append([folder for _, folder in runs])

    def start(self) -> None: ...

    def run(self, plan: Plan, run_dir: Path) -> FakeJob:
        for look in self.looks:
            if isinstance(look, Ending) and look.started:
                number = look.scheduler.attempt if look.scheduler else 0
                place = attempt.make(run_dir, number)
                for rank in range(plan.world_size):
                    write_recording(place, rank)
        self.handles.append(FakeJob(*self.looks))
        return self.handles[-1]

    def rest(self, seconds: float) -> None: ...

    def close(self) -> None:
        self.closed = True


def done(number: int = 0) -> Ending:
    return Ending(exits=exits(0, 0), wall_s=1.0, scheduler=Scheduler("77", "COMPLETED", attempt=number))


class Desk:
    def __init__(self, tmp_path: Path, *looks: Any, detach: bool = False, max_pending_s: float | None = None) -> None:
        self.tmp_path, self.stream, self.queue = tmp_path, io.StringIO(), FakeQueue(*looks)
        self.slurm = Slurm(max_pending_s=max_pending_s)
        command = lambda plan, folder: (["sbatch"], {})  # noqa: E731
        idle = FakeSupervisor(lambda plan, folder: None, done())
        self.session = Session(Live(self.stream, Style()), idle, command, FakeWatch, tmp_path, slurm=self.queue, detach=detach)

    def job(self, name: str = "train") -> tuple[Job, Judging]:
        plan = make_plan(scenario=Scenario(name, f"{name}.py"), cwd=str(self.tmp_path), launcher="slurm", slurm=self.slurm)
        return Job(plan, resolve({}, {}, self.tmp_path)), Judging()

    def run(self, *names: str) -> list[Any]:
        return self.session.run([self.job(name) for name in names or ("train",)])

    @property
    def shown(self) -> str:
        return self.stream.getvalue()


def status(result: Any) -> str:
    return str(json.loads((result.folder / "report.json").read_text())["status"])


def test_it_waits_runs_and_is_judged(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "job 77 is pending: Priority", "job 77 is pending: Priority", 0, done())
    (result,) = desk.run()
    assert result.verdict.exit_code == 0 and status(result) == "done"
    assert "squeue -j 77; scancel 77; harness attach" in desk.shown and desk.queue.closed


def test_a_reason_that_does_not_go_away_is_said_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, *["job 77 is pending: PartitionConfig"] * 12, 0, done())
    desk.run()
    assert desk.shown.count("may wait for ever") == 1


def test_a_job_that_waits_too_long_is_stopped(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "job 77 is pending: Resources", max_pending_s=1e-9)
    (result,) = desk.run()
    assert desk.queue.handles[0].stopped == "pending" and result.verdict.ending.reason == "pending"
    assert result.verdict.exit_code == 4


def test_a_detached_run_is_left_and_never_0(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "job 77 submitted", detach=True)
    (result,) = desk.run()
    assert (result.verdict.exit_code, status(result), desk.queue.handles[0].stopped) == (5, "detached", "")
    assert "job 77 goes on without us; come back with: harness attach" in desk.shown


@pytest.mark.parametrize(
    ("number", "again", "stopped", "code", "state"),
    [
        (signal.SIGINT, False, "", 130, "detached"),
        (signal.SIGINT, True, "interrupted", 130, "done"),
        (signal.SIGHUP, False, "", 143, "detached"),
        (signal.SIGTERM, False, "interrupted", 143, "done"),
    ],
)
def test_what_a_signal_means_to_a_job(tmp_path: Path, number: int, again: bool, stopped: str, code: int, state: str) -> None:
    desk = Desk(tmp_path, 0)
    desk.session.interrupts.signal = None

    class Struck(FakeWatch):
        def stalled_s(self) -> float:
            return 0.0

        def silent_s(self) -> float:
            desk.session.interrupts.signal, desk.session.interrupts.again = number, again
            return 0.0

    desk.session.watch = Struck
    (result,) = desk.run()
    assert (desk.queue.handles[0].stopped, result.verdict.exit_code, status(result)) == (stopped, code, state)


def test_a_requeued_job_is_judged_by_its_last_attempt(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 0, "job 77 is pending: BeginTime", 1, done(1))
    (result,) = desk.run()
    assert "put job 77 back into the queue; what it left is put aside, attempt 2 follows" in desk.shown
    assert result.verdict.exit_code == 0
    assert replay.read_run(result.folder, result.verdict.plan, done(1), 2).present
    assert not replay.read_run(result.folder, result.verdict.plan, done(0), 2).present


def test_several_runs_are_submitted_at_once_and_judged_in_order(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 0, done())
    results = desk.run("a", "b", "c")
    assert [[folder.name.split("-", 2)[2] for folder in group] for group in desk.queue.submitted] == [["a", "b", "c"]]
    assert [r.verdict.plan.scenario.name for r in results] == ["a", "b", "c"]


def test_who_leaves_one_element_leaves_them_all_at_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 0)

    class Struck(FakeWatch):
        def stalled_s(self) -> float:
            return 0.0

        def silent_s(self) -> float:
            desk.session.interrupts.signal = signal.SIGINT
            return 0.0

    desk.session.watch = Struck
    results = desk.run("a", "b", "c")
    assert [status(r) for r in results] == ["detached"] * 3
    document = report_json.session([r.report for r in results], 130)
    jsonschema.validate(document, json.loads(report_json.SCHEMA_FILE.read_text()))
    assert junit.render([r.report for r in results]).count("still running or killed") >= 3


def test_attach_follows_a_run_that_was_left(tmp_path: Path) -> None:
    (left,) = Desk(tmp_path, 0, detach=True).run()
    desk = Desk(tmp_path, 0, done())
    result = desk.session.attach(replay.open_folder(left.folder))
    assert result.verdict.exit_code == 0 and status(result) == "done"


def test_a_folder_is_shown_as_one_would_type_it() -> None:
    plan = make_plan(cwd="/home/u")
    assert shown(Path("/home/u/.harness/2026-x"), plan.cwd) == "2026-x"
    assert shown(Path("/shared/my run"), replace(plan, cwd="/home/u").cwd) == "'/shared/my run'"
