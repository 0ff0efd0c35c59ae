"""Runs many scripts, each alone in an empty folder, on warm servers, and says what was found in each.

`harness selftest` runs the planted faults and their healthy twins through this; `scripts/cases` runs pairs of user-style scripts.
"""

from __future__ import annotations

import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness import catalog, replay, suppress
from harness.looking import Interrupts
from harness.model import Finding, Outcome, OutcomeKind, Severity
from harness.onset import steps_until
from harness.planning import make_job
from harness.probe import protocol
from harness.record import load_recordings
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
    alone: bool = False  # it is judged on time, which another trial beside it would take


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
    onset_steps: int | None = None  # after how many steps the wanted code could be told; None: at the end, or not found
    probe_error: str = ""  # the first thing in the probe that failed: a sensor was silent, so the result says less

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


def run_trials(trials: Iterable[Trial], keep: Path | None = None, num_lanes: int = 1) -> Iterator[Tried]:
    """Run them; a result as soon as there is one. `num_lanes` at a time, each lane with warm servers of its own, then those that want to be
    alone. In one lane they come in order. Folders are removed unless `keep` names where they stay."""
    interrupts = Interrupts()
    lanes = [_lane(interrupts) for _ in range(num_lanes)]
    try:
        with interrupts.caught():
            if num_lanes > 1:
                chosen = list(trials)
                yield from _side_by_side(lanes, [trial for trial in chosen if not trial.alone], keep)
                trials = [trial for trial in chosen if trial.alone]
            for trial in trials:
                if interrupts.signal is not None:
                    return
                yield _run_one(lanes[0], trial, keep)
    finally:
        for lane in lanes:
            lane.supervisor.close()


def _lane(interrupts: Interrupts) -> Session:
    from harness.launch import driver
    from harness.watch.view import View

    screen = live.Live(None, Style(), animate=False, cwd=".")
    return Session(screen, driver.Supervisor(), driver.command, View, Path.cwd(), interrupts, suspicious=False)


def _side_by_side(lanes: list[Session], trials: list[Trial], keep: Path | None) -> Iterator[Tried]:
    """Threads: a controller waits and reads small files, its ranks do the work."""
    shared = Turns(trials)
    done: queue.SimpleQueue[Tried | None] = queue.SimpleQueue()

    def run(lane: Session) -> None:
        try:
            while lane.interrupts.signal is None and (trial := shared.next(lane)) is not None:
                done.put(_run_one(lane, trial, keep))
        finally:
            done.put(None)

    with ThreadPoolExecutor(len(lanes)) as workers:
        running = [workers.submit(run, lane) for lane in lanes]
        try:
            for _ in lanes:
                yield from iter(done.get, None)
        finally:
            shared.stop()
        for one in running:
            one.result()


class Turns:
    """Deals trials to lanes. A lane goes on with trials that its warm servers can serve, because others cost it an import of torch."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._lock = threading.Lock()
        self._left: dict[object, list[Trial]] = {}
        for trial in trials:
            self._left.setdefault(_servers(trial), []).append(trial)
        self._serves: dict[int, object] = {}

    def next(self, lane: object) -> Trial | None:
        with self._lock:
            mine = self._serves.get(id(lane))
            if not self._left.get(mine):
                taken = set(self._serves.values())
                mine = max(self._left, key=lambda kind: (bool(self._left[kind]), kind not in taken, len(self._left[kind])), default=None)
                self._serves[id(lane)] = mine
            return self._left[mine].pop(0) if self._left.get(mine) else None

    def stop(self) -> None:
        with self._lock:
            self._left.clear()


def _servers(trial: Trial) -> object:
    """Trials of one kind find the servers that they need under one environment (see pool.server_environment)."""
    return trial.nproc > 1, tuple(sorted((k, v) for k, v in trial.env.items() if not k.startswith("_HARNESS_")))


def _run_one(session: Session, trial: Trial, keep: Path | None) -> Tried:
    folder = Path(tempfile.mkdtemp(prefix="trial_", dir=keep)).resolve()
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
        failed = str((verdict.summary.get("probe") or {}).get("first_error") or "")
        wall_s = time.monotonic() - begun
        found = trial.wants is not None and any(f.code == trial.wants for f in verdict.findings)
        recordings = load_recordings(result.folder / protocol.REC_DIR) if found else []
        onset = steps_until(str(trial.wants), recordings, verdict.plan, session.cores)
        return Tried(trial, verdict.findings, verdict.outcomes, verdict.exit_code, wall_s, steps, str(folder), onset, failed)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
