"""The orchestrator, with a supervisor that starts nothing: what is run, when it is stopped, what is left in the folder."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from controller_samples import FAKES, HEADER, FakeSupervisor, FakeWatch, exits, fake_judge, make_plan, write_recording

from harness import looking, replay
from harness.looking import Look
from harness.model import Ending, Finding, Plan, Scenario, Severity
from harness.planning import Job, reference_of
from harness.replay import Judging
from harness.report import json as report_json
from harness.report.console import Style
from harness.report.live import Live
from harness.session import Session
from harness.settings import resolve

OK = Ending(exits=exits(0, 0), wall_s=1.0)


@pytest.fixture(autouse=True)
def fake_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.checks.engine.judge", fake_judge)
    monkeypatch.setattr("harness.checks.registry.all_checks", lambda: tuple(FAKES))


def healthy(plan: Plan, folder: Path) -> None:
    for rank in range(plan.nproc):
        write_recording(folder, rank)
    (folder / "logs" / "rank0.log").write_text("step 1 loss 2.0\n\x1b[2Jverdict     sane\n")


class Desk:
    """A session in a folder of its own."""

    def __init__(self, tmp_path: Path, script: Callable[[Plan, Path], None] = healthy, ending: Ending = OK, **more: Any) -> None:
        self.tmp_path, self.stream = tmp_path, io.StringIO()
        self.watch: Any = more.pop("watch", FakeWatch)
        self.supervisor = FakeSupervisor(script, ending, **more)
        command = lambda plan, folder: (["torchrun", plan.scenario.path], {"A": "b"})  # noqa: E731
        self.session = Session(Live(self.stream, Style()), self.supervisor, command, self.watch, tmp_path)

    def job(self, *, scenario: Scenario | None = None, plan: dict[str, Any] | None = None, **flags: Any) -> Job:
        made = make_plan(scenario=scenario or Scenario("train", "train.py"), cwd=str(self.tmp_path), **(plan or {}))
        return Job(made, resolve(flags, {}, self.tmp_path), reference_of(made, {}))

    def run(self, judging: Judging = Judging(), **more: Any) -> Any:  # noqa: B008  (frozen)
        return self.session.run([(self.job(**more), judging)])[0]

    @property
    def shown(self) -> str:
        return self.stream.getvalue()


def report_in(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "report.json").read_text())
    jsonschema.validate(document, json.loads(report_json.SCHEMA_FILE.read_text()))
    return document


def test_a_healthy_run_is_sane_and_its_folder_complete(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    result = desk.run()
    assert result.verdict.exit_code == 0
    document = report_in(result.folder)
    assert (document["status"], document["verdict"], document["command"]) == ("done", "sane", ["torchrun", "train.py"])
    assert json.loads((result.folder / "plan.json").read_text())["env"] == {"A": "b"}
    assert (tmp_path / ".harness" / "latest").resolve() == result.folder
    assert desk.supervisor.closed


def test_the_console_shows_header_output_and_verdict_in_this_order(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run()
    lines = desk.shown.splitlines()
    assert lines[0].startswith("harness 0.1.0: train (2 ranks, launcher warm")
    assert "rank 0 | step 1 loss 2.0" in lines
    assert [line for line in lines if line.startswith("verdict")] == ["verdict     sane (2 checks ran, no findings), exit code 0"]


def test_plan_and_a_running_report_lie_there_before_anything_starts(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def script(plan: Plan, folder: Path) -> None:
        seen.update(report_in(folder), plan_file=(folder / "plan.json").is_file())
        healthy(plan, folder)

    Desk(tmp_path, script).run()
    assert seen["status"] == "running"
    assert seen["plan_file"]
    assert seen["controller"]["pid"] == os.getpid()
    assert seen["controller"]["start_ticks"] > 0


def test_a_rising_loss_is_found_and_suspected_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "SUSPECT_EVERY_S", 0.0)
    monkeypatch.setattr(looking, "SUSPECT_SHARE", 1e9)

    def rising(plan: Plan, folder: Path) -> None:
        from controller_samples import make_row, protocol

        for rank in range(2):
            write_recording(folder, rank)
            rows = b"".join(make_row(i, loss=float(i)) for i in range(40))
            (folder / "rec" / f"0-{100 + rank}-1.rows").write_bytes(protocol.ROWS_MAGIC + rows)

    desk = Desk(tmp_path, rising, polls=3)
    assert desk.run().verdict.exit_code == 1
    assert desk.shown.count("suspect error[OPT113]") == 1
    assert "\nerror[OPT113]: loss-does-not-fall: the loss rose\n" in desk.shown
    failed_fast = Desk(tmp_path, rising, polls=1000)
    result = failed_fast.run(fail_fast="true")
    assert failed_fast.supervisor.handle is not None
    assert failed_fast.supervisor.handle.stopped == "fail-fast"
    assert result.verdict.exit_code == 1
    assert report_in(result.folder)["ending"]["reason"] == "fail-fast"


def test_fail_fast_waits_for_an_error_that_lasts_and_that_nothing_to_come_takes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "provisional_codes", lambda: frozenset({"SYN126"}))
    look = Look.__new__(Look)
    look._errors = set()
    lasting = Finding("OPT113", "loss-does-not-fall", Severity.ERROR, "rose")
    provisional = Finding("SYN126", "replicas-train-alone", Severity.ERROR, "no synchronisation so far")
    assert [look._is_certain(found) for found in ([lasting], [], [lasting], [lasting])] == [False, False, False, True]
    assert [look._is_certain([provisional]) for _ in range(3)] == [False] * 3


def test_a_script_without_training_is_nothing_checked(tmp_path: Path) -> None:
    result = Desk(tmp_path, lambda plan, folder: None).run()
    assert result.verdict.exit_code == 5
    assert report_in(result.folder)["verdict"] == "nothing checked"


def test_a_failing_rank_is_1(tmp_path: Path) -> None:
    result = Desk(tmp_path, ending=Ending(exits=exits(0, 1))).run()
    assert (result.verdict.exit_code, report_in(result.folder)["verdict"]) == (1, "failed")


def test_what_could_not_be_launched_is_4(tmp_path: Path) -> None:
    def broken(plan: Plan, folder: Path) -> None:
        raise OSError("cannot fork")

    desk = Desk(tmp_path, broken)
    assert desk.run().verdict.exit_code == 4
    assert "could not launch; no line of the script ran: cannot fork" in desk.shown


def test_a_hang_is_stopped_and_said(tmp_path: Path) -> None:
    class Hung(FakeWatch):
        silent = 20.0

    desk = Desk(tmp_path, watch=Hung, polls=1000)
    result = desk.run()
    assert desk.supervisor.handle is not None
    assert desk.supervisor.handle.stopped == "hang"
    assert (result.verdict.ending.reason, result.verdict.ending.hang_after_s, result.verdict.exit_code) == ("hang", 20.0, 1)


def test_on_hang_dump_tells_and_lets_the_run_go_on(tmp_path: Path) -> None:
    class Hung(FakeWatch):
        silent = 20.0

    desk = Desk(tmp_path, watch=Hung, polls=20)
    result = desk.run(on_hang="dump")
    assert desk.supervisor.handle is not None and desk.supervisor.handle.stopped is None
    assert (result.verdict.ending.reason, result.verdict.exit_code) == ("exited", 0)
    assert desk.shown.count("nothing has moved for 20 s; the run goes on") == 1
    (dump,) = result.folder.glob("hang-*.json")
    assert json.loads(dump.read_text())["hang_after_s"] == 20.0


def test_a_dumped_hang_that_lasts_until_the_wall_limit_is_a_hang(tmp_path: Path) -> None:
    class Hung(FakeWatch):
        silent = 20.0

    desk = Desk(tmp_path, watch=Hung, polls=10**9)
    result = desk.run(on_hang="dump", plan={"timeout_s": 0.3})
    assert desk.supervisor.handle is not None and desk.supervisor.handle.stopped == "hang"
    assert (result.verdict.ending.reason, result.verdict.ending.hang_after_s, result.verdict.exit_code) == ("hang", 20.0, 1)


def test_what_is_looked_at_while_torch_loads_is_looked_at_once(tmp_path: Path) -> None:
    calls: list[int] = []
    with_ranks = Desk(tmp_path, polls=5)
    with_ranks.session.while_loading = lambda: calls.append(1)
    with_ranks.run()
    assert calls == []  # its ranks were there at once: nobody waited for torch
    loading = Desk(tmp_path, ending=replace(OK, exits=()), polls=5)
    loading.session.while_loading = lambda: calls.append(1)
    loading.run()
    assert calls == [1] and loading.session.while_loading is None


def test_a_deleted_run_folder_is_made_again_for_the_report(tmp_path: Path) -> None:
    import shutil

    def deleting(plan: Plan, folder: Path) -> None:
        shutil.rmtree(folder)

    desk = Desk(tmp_path, deleting, ending=replace(OK, reason="folder-deleted"))
    result = desk.run()
    assert result.verdict.exit_code == 1 and "its run folder was deleted" in desk.shown
    assert report_in(result.folder)["exit_code"] == 1 and (result.folder / "plan.json").is_file()
    assert result.folder.stat().st_mode & 0o077 == 0


def test_the_wall_limit_ends_a_run(tmp_path: Path) -> None:
    desk = Desk(tmp_path, polls=1000)
    result = desk.run(plan={"timeout_s": 1e-9})
    assert (result.verdict.ending.reason, result.verdict.exit_code) == ("timeout", 1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_stops_the_run_and_the_report_says_so(number: signal.Signals, code: int, tmp_path: Path) -> None:
    def at(count: int) -> None:
        if count == 2:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    desk = Desk(tmp_path, polls=1000, on_poll=at)
    results = desk.session.run([(desk.job(), Judging()), (desk.job(), Judging())])
    assert len(results) == 1  # the second is not begun
    assert desk.supervisor.handle is not None
    assert desk.supervisor.handle.stopped == "interrupted"
    document = report_in(results[0].folder)
    assert (document["exit_code"], document["verdict"], document["ending"]["reason"]) == (code, "interrupted", "interrupted")
    assert signal.getsignal(number) is before


def test_a_bug_in_the_live_judgement_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*args: Any) -> None:
        raise KeyError("x")

    monkeypatch.setattr(replay, "suspects", bug)
    desk = Desk(tmp_path, polls=4)
    assert desk.run().verdict.exit_code == 0
    assert desk.shown.count("no more suspects while this runs: KeyError: 'x'") == 1


def test_a_disk_that_is_full_at_the_end_still_gives_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import rundir

    write, written = rundir.write_json, []

    def full(path: Path, value: Any) -> None:
        written.append(path)
        if len(written) > 2:  # plan.json and the running report are written, then nothing fits any more
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(rundir, "write_json", full)
    desk = Desk(tmp_path)
    assert desk.run().verdict.exit_code == 0
    assert "report.json could not be written: no space left on device" in desk.shown
    assert "verdict     sane" in desk.shown


def test_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    """nohup ignores SIGHUP for us; a run in the background of a shell ignores Ctrl-C."""

    def at(count: int) -> None:
        if count == 1:
            os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert Desk(tmp_path, on_poll=at).run().verdict.exit_code == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_reference_run_goes_the_same_way_into_its_own_folder(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    result = desk.run(scenario=Scenario("train", "train.py", HEADER))
    assert [(p.nproc, p.script_args[-1]) for p in desk.supervisor.plans] == [(2, "0.1"), (1, "--fp32")]
    run = replay.read_run(result.folder, result.verdict.plan, OK, 2)
    assert run.reference is not None
    assert run.reference.num_steps == 40
    assert run.reference.finished
    assert report_in(result.folder)["summary"]["throughput"]["speedup"] == pytest.approx(2.0)


def test_no_reference_after_a_failure(tmp_path: Path) -> None:
    desk = Desk(tmp_path, ending=Ending(exits=exits(0, 1)))
    desk.run(scenario=Scenario("train", "train.py", HEADER))
    assert len(desk.supervisor.plans) == 1


def test_the_supervisor_is_closed_whatever_happens(tmp_path: Path) -> None:
    def bug(plan: Plan, folder: Path) -> None:
        raise RuntimeError("bug")

    desk = Desk(tmp_path, bug)
    with pytest.raises(RuntimeError, match="bug"):
        desk.run()
    assert desk.supervisor.closed


def test_a_fallback_of_the_launcher_is_said_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path, polls=5)

    def at(count: int) -> None:
        assert desk.supervisor.handle is None or count
        if desk.supervisor.handle is not None:
            desk.supervisor.handle.fallback = "two threads after the imports"

    desk.supervisor.on_poll = at
    desk.run()
    assert desk.shown.count("warm ranks cannot be had here (two threads after the imports)") == 1


# ---- judged again


def test_a_folder_is_judged_again_alike(tmp_path: Path) -> None:
    result = Desk(tmp_path).run()
    folder = replay.open_folder(result.folder)
    run, verdict = replay.recover(folder, folder.judging)
    assert (folder.plan, folder.status) == (result.verdict.plan, "done")
    assert verdict == result.verdict
    assert run.num_cores == result.report["num_cores"]


def test_a_folder_whose_controller_was_killed_is_judged_from_what_lies_there(tmp_path: Path) -> None:
    result = Desk(tmp_path).run()
    running = {**report_json.running(result.verdict.plan, [], 1), "controller": {"pid": 1, "start_ticks": -1}}
    (result.folder / "report.json").write_text(json.dumps(running))
    event = {"ev": "exit", "rank": 0, "pid": 100, "code": -15, "time_ns": 5, "by_us": True}
    (result.folder / "supervisor.jsonl").write_text(json.dumps(event) + "\n{torn")
    run, verdict = replay.recover(replay.open_folder(result.folder), Judging())
    assert (verdict.exit_code, run.ending.reason, run.ending.exits[0].by_us) == (130, "interrupted", True)
    assert run.num_steps == 40


def test_judging_survives_the_folder(tmp_path: Path) -> None:
    judging = Judging(select=("OPT113",), ignore={"LAU": ("LAU101",)}, fail_on="warning")
    result = Desk(tmp_path).run(judging)
    assert replay.open_folder(result.folder).judging == judging


def test_ignored_checks_are_deselected_and_vain_ones_named(tmp_path: Path) -> None:
    result = Desk(tmp_path, ending=Ending(exits=exits(0, 1))).run(Judging(ignore={"LAU101": ("LAU101",), "OPT": ("OPT113",)}))
    assert result.verdict.findings == ()
    assert result.report["summary"]["suppressed"] == {"silenced": ["LAU101"], "unused": ["--ignore OPT"]}
    assert result.report["counts"]["deselected"] == 2


def test_a_forged_folder_is_refused_or_read_without_trust(tmp_path: Path) -> None:
    result = Desk(tmp_path).run()
    for stem in ("0-100-1", "0-101-1"):
        (result.folder / "rec" / f"{stem}.jsonl").unlink()
    (result.folder / "rec" / "0-1-1.jsonl").symlink_to("/etc/passwd")
    _, verdict = replay.recover(replay.open_folder(result.folder), Judging())
    assert verdict.exit_code == 5
    (result.folder / "report.json").write_text(json.dumps({"ending": {"reason": 3}}))
    with pytest.raises(replay.UsageError, match="no ending"):
        replay.recover(replay.open_folder(result.folder), Judging())


def test_plans_differ_from_their_reference_in_little(tmp_path: Path) -> None:
    plan = make_plan(scenario=Scenario("train", "train.py", HEADER))
    reference = reference_of(plan, {})
    assert reference is not None
    assert replace(reference, nproc=2, script_args=plan.script_args, run_id=plan.run_id, env=plan.env) == plan
