"""A run folder becomes a Run, and a Run a Verdict: the same way live, at the end, and for a folder that a killed controller left."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness import attempt, errors, rundir, suppress, worlds
from harness.assembly import assemble
from harness.errors import UsageError
from harness.model import Ending, Finding, Plan, RankExit, Scheduler, Severity, Verdict
from harness.probe import protocol
from harness.record import Run, load_recordings
from harness.report import figures
from harness.report.verdict import exit_code
from harness.suppress import Comment, Silenced


@dataclass(frozen=True)
class Judging:
    """What the user asked of the verdict: exact codes, and the severity that fails a run."""

    select: tuple[str, ...] = ()
    ignore: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # word as typed -> the codes it means
    fail_on: str = "error"
    comments: tuple[Comment, ...] = ()  # suppressions in the script


@dataclass(frozen=True)
class Folder:
    """A run folder read back: its plan, how it was to be judged, and what report.json says."""

    path: Path
    plan: Plan
    judging: Judging
    num_cores: int
    command: tuple[str, ...]
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        return str(self.report.get("status", ""))


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- folder -> Run


def read_run(folder: Path, plan: Plan, ending: Ending, cores: int, *, live: bool = False) -> Run:
    """The run as the checks see it. The reference run, if its folder is there, comes with it."""
    number = ending.scheduler.attempt if ending.scheduler is not None else 0
    place = attempt.folder_of(folder, number)  # what earlier attempts of a requeued job left is not read
    run = assemble(
        plan,
        load_recordings(place / protocol.REC_DIR),
        ending=ending,
        logs={} if live else rundir.read_logs(place),
        nodes=_node_facts(place) if plan.slurm is not None else [],
        num_cores=cores,
        expect=dict(plan.scenario.header.expect),
        live=live,
    )
    reference = folder / rundir.REFERENCE_DIR
    if not live and (reference / protocol.PLAN_FILE).is_file() and not reference.is_symlink():
        run.reference = read_run(reference, rundir.read_plan(reference), recorded_ending(reference), cores)
    return run


def _node_facts(place: Path) -> list[Mapping[str, Any]]:
    """What each supervisor of a Slurm job found on its node: at its start, and whom its ranks no longer heard at their end."""
    events = list(attempt.Told(place).events())
    silent = {agent: event["peers"] for agent, event in events if event["ev"] == "silent" and "peers" in event}
    return [{**event, "silent": silent.get(agent, [])} for agent, event in events if event["ev"] == "hello"]


def recorded_ending(folder: Path) -> Ending:
    """How a run ended, from report.json, else from the supervisor's own lines, else unknown: interrupted."""
    with_report = folder / protocol.REPORT_FILE
    if with_report.is_file():
        report = rundir.read_json(with_report)
        if isinstance(report, dict) and isinstance(report.get("ending"), dict):
            return ending_from(report["ending"])
    return supervised_ending(folder)


def ending_from(raw: Mapping[str, Any]) -> Ending:
    import msgspec

    try:
        return msgspec.convert(raw, Ending)
    except msgspec.ValidationError as error:
        raise UsageError(f"report.json holds no ending of this harness: {error}") from None


def supervised_ending(folder: Path) -> Ending:
    """The ending of a run whose controller was killed. The supervisor outlived it and wrote down what it did."""
    exits: list[RankExit] = []
    left: tuple[str, ...] = ()
    oom_kills = 0
    started = any((folder / protocol.REC_DIR).glob("*.jsonl")) if (folder / protocol.REC_DIR).is_dir() else False
    path = folder / protocol.SUPERVISOR_FILE
    lines = path.read_bytes().splitlines() if path.is_file() and not path.is_symlink() else []
    for line in lines:
        try:
            event = json.loads(line)
            if event.get("ev") == "exit":
                exits.append(
                    RankExit(int(event["rank"]), int(event["pid"]), int(event["code"]), int(event["time_ns"]), bool(event["by_us"]))
                )
            elif event.get("ev") == "ending":
                left = tuple(str(thing) for thing in event["left_behind"])
                oom_kills = int(event.get("oom_kills", 0))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            continue
    return Ending(reason="interrupted", started=started, exits=tuple(exits), left_behind=left, oom_kills=oom_kills)


def open_folder(path: Path) -> Folder:
    """plan.json and report.json of a run folder."""
    plan = rundir.read_plan(path)
    raw = rundir.read_json(path / protocol.PLAN_FILE)
    report = rundir.read_json(path / protocol.REPORT_FILE) if (path / protocol.REPORT_FILE).is_file() else {}
    cores = raw.get("num_cores")
    return Folder(
        path,
        plan,
        _judging(raw.get("judging")),
        cores if isinstance(cores, int) and cores > 0 else num_cores(),
        tuple(str(word) for word in command) if isinstance(command := raw.get("command"), list) else (),
        report if isinstance(report, dict) else {},
    )


def _judging(raw: Any) -> Judging:
    if not isinstance(raw, dict):
        return Judging()
    import msgspec

    try:
        return msgspec.convert(raw, Judging)
    except msgspec.ValidationError as error:
        raise UsageError(f"plan.json does not say how to judge: {error}") from None


# ---- Run -> Verdict


def judge(run: Run, judging: Judging) -> Silenced:
    """All selected checks, then what the user silenced is taken out; ignored checks run too, else nobody could say that one was in vain."""
    from harness.checks.engine import judge as engine_judge

    outcomes, findings = worlds.merged([engine_judge(one, judging.select, ()) for one in worlds.judged(run)], run.num_unjudged)
    return suppress.apply(outcomes, findings, run.plan.scenario.path, judging.comments, judging.ignore)


def check_names() -> dict[str, str]:
    """Code -> name of every check."""
    from harness.checks.registry import all_checks

    return {check.code: check.name for check in all_checks()}


def substantial_codes() -> frozenset[str]:
    """Codes of the checks that count as "something was checked"."""
    from harness.checks.registry import all_checks

    return frozenset(check.code for check in all_checks() if check.substantial)


def provisional_codes() -> frozenset[str]:
    """Codes of the checks that conclude from what has not come so far."""
    from harness.checks.registry import all_checks

    return frozenset(check.code for check in all_checks() if check.provisional)


def settle(run: Run, judging: Judging, signal_code: int | None = None) -> Verdict:
    """The final verdict. `signal_code`: 130 or 143 where somebody ended the session."""
    judged = judge(run, judging)
    code = signal_code or exit_code(run.ending, judged.outcomes, judged.findings, fail_on=judging.fail_on, substantial=substantial_codes())
    suppressed = {"silenced": [f.code for f in judged.silenced], "unused": list(judged.unused)}
    summary = {**figures.summarise(run), "suppressed": suppressed}
    return Verdict(run.plan, judged.outcomes, judged.findings, code, summary, run.ending)


def suspects(folder: Path, plan: Plan, judging: Judging, cores: int, number: int = 0) -> Sequence[Finding]:
    """Findings on the recording so far; provisional. `number`: which attempt of a requeued job."""
    ending = Ending(reason="running", scheduler=Scheduler(attempt=number) if number else None)
    return judge(read_run(folder, plan, ending, cores, live=True), judging).findings


def all_told(folder: Folder) -> bool:
    """Whether every node of a Slurm run has told its ending."""
    from harness.launch.slurm_follow import Follower  # no run on this machine alone pays for it
    from harness.launch.slurm_layout import num_agents

    return len(Follower(folder.path, attempt.newest(folder.path)).poll().endings) >= num_agents(folder.plan)


def _told_ending(folder: Folder, alive: bool) -> Ending:
    """How far a run on Slurm is, by its nodes' own words, where no controller wrote it down."""
    from harness.launch.slurm_follow import Follower, ending_of
    from harness.launch.slurm_jobs import job_of

    number = attempt.newest(folder.path)
    scheduler = Scheduler(job_of(folder.path), attempt=number)
    if alive:
        return Ending(reason="running", scheduler=scheduler)
    return replace(ending_of(Follower(folder.path, number).poll(), 0.0), scheduler=scheduler)


def hang_findings(folder: Path, plan: Plan, judging: Judging, ending: Ending, cores: int) -> Sequence[Finding]:
    """What a run that stands still shows right now; errors only, as the rest of it is still to come."""
    try:
        findings = judge(read_run(folder, plan, ending, cores), judging).findings
    except OSError:
        return ()
    return [f for f in findings if f.severity is Severity.ERROR]


def recover(folder: Folder, judging: Judging, *, alive: bool = False) -> tuple[Run, Verdict]:
    """Judge a folder again from its recordings. `alive`: the run still goes on, so what lies there is no ending."""
    if folder.plan.launcher == "slurm" and "ending" not in folder.report:
        ending = _told_ending(folder, alive)
    else:
        ending = Ending(reason="running") if alive else recorded_ending(folder.path)
    run = read_run(folder.path, folder.plan, ending, folder.num_cores)
    code = folder.report.get("exit_code")
    interrupted = code if code in (errors.EXIT_SIGINT, errors.EXIT_SIGTERM) else None
    return run, settle(run, judging, interrupted)
