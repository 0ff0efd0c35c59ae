"""Runs scripts one after another, each alone in an empty folder, on one set of warm servers, and says what was found in each.

`harness selftest` runs the planted faults and their healthy twins through this; `scripts/cases` runs pairs of user-style scripts.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import catalog, replay, suppress
from harness.model import Finding, Outcome, OutcomeKind, Severity
from harness.planning import make_job
from harness.report import live
from harness.report.console import Style
from harness.session import Session
from harness.settings import resolve

SCRIPT = "train.py"  # a neutral name: neither path nor left-over files give a script away


@dataclass(frozen=True)
class Trial:
    """One script to run. `wants` is the code that should be found; None: a healthy script."""

    name: str
    source: str
    nproc: int
    wants: str | None = None
    lines: tuple[int, int] | None = None  # first and last line of the planted edit
    timeout_s: float = 120.0
    hang_timeout_s: float | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tried:
    """What became of a trial."""

    trial: Trial
    findings: tuple[Finding, ...]
    outcomes: tuple[Outcome, ...]
    exit_code: int
    wall_s: float
    num_steps: int
    folder: str

    @property
    def alarms(self) -> list[Finding]:
        """Findings of warning level and above."""
        return [f for f in self.findings if f.severity >= Severity.WARNING]

    @property
    def detected(self) -> bool:
        return bool(self.alarms)

    @property
    def right_cause(self) -> bool:
        """Exactly one alarm, and with the wanted code."""
        return [f.code for f in self.alarms] == [self.trial.wants]

    @property
    def right_line(self) -> bool:
        """The finding stands on the edited statement (true where the edit's lines are not known)."""
        first, last = self.trial.lines or (0, 1 << 30)
        return any(f.where is not None and first <= f.where.line <= last for f in self.alarms if f.code == self.trial.wants)

    @property
    def crashed(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.kind is OutcomeKind.CRASHED]

    def ran(self, code: str) -> bool:
        return any(o.code == code and o.kind is OutcomeKind.RAN for o in self.outcomes)


def run_trials(trials: Iterable[Trial], keep: Path | None = None) -> Iterator[Tried]:
    """Run them in order; a result as soon as there is one. Folders are removed unless `keep` names where they stay."""
    from harness.launch import driver
    from harness.watch.view import View

    screen = live.Live(None, Style(), animate=False, cwd=".")
    supervisor = driver.Supervisor()
    session = Session(screen, supervisor, driver.command, View, Path.cwd())
    try:
        with session.interrupts.caught():
            for trial in trials:
                if session.interrupts.signal is not None:
                    return
                yield _run_one(session, trial, keep)
    finally:
        supervisor.close()


def _run_one(session: Session, trial: Trial, keep: Path | None) -> Tried:
    parent = keep if keep is not None else None
    folder = Path(tempfile.mkdtemp(prefix="trial_", dir=parent)).resolve()
    begun = time.monotonic()
    try:
        (folder / SCRIPT).write_text(trial.source, encoding="utf-8")
        settings = resolve({"nproc": str(trial.nproc), "timeout": str(trial.timeout_s), "no_reference": True}, {}, folder)
        scenario = catalog.user_script(SCRIPT, folder)
        job = make_job(scenario, settings, trial.args, folder, {})
        job = replace(job, plan=replace(job.plan, hang_timeout_s=trial.hang_timeout_s, cwd=str(folder), env={**job.plan.env, **trial.env}), reference=None)
        session.cwd = folder
        result = session.run_one(job, replay.Judging((), {}, "warning", suppress.comments_in(trial.source)))
        verdict = result.verdict
        steps = max((int(r.get("num_steps") or 0) for r in result.report.get("ranks", ())), default=0)
        return Tried(trial, verdict.findings, verdict.outcomes, verdict.exit_code, time.monotonic() - begun, steps, str(folder))
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
