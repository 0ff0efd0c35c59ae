"""The only orchestrator: plan > launch > watch > check > report, for one script after another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from harness import errors, procfs, replay, rundir
from harness.errors import UsageError
from harness.looking import Interrupts, Look
from harness.model import Ending, Plan, Verdict
from harness.planning import Job
from harness.probe import protocol
from harness.queueing import DETACHED, Queue, Queued
from harness.replay import Judging
from harness.report import console
from harness.report import json as report_json
from harness.report.live import Live
from harness.report.text import count

POLL_S = 0.1


class Handle(Protocol):
    """A run that goes on (harness/launch/driver.py)."""

    @property
    def fallback(self) -> str: ...
    @property
    def pids(self) -> dict[int, int]: ...
    def poll(self) -> Ending | None: ...
    def stop(self, reason: str) -> None: ...


class Launching(Protocol):
    """The supervisor (harness/launch/driver.py)."""

    def start(self) -> None: ...
    def run(self, plan: Plan, run_dir: Path) -> Handle: ...
    def rest(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class Submitting(Launching, Protocol):
    """The Slurm launcher (harness/launch/slurm.py): takes several runs at once."""

    def submit(self, runs: Sequence[tuple[Plan, Path]]) -> None: ...


@dataclass(frozen=True)
class Result:
    """One script, judged."""

    verdict: Verdict
    report: Mapping[str, Any]
    folder: Path
    plain_text: str  # what the console shows, without colours


@dataclass(frozen=True)
class Prepared:
    """One script, its folder made, nothing started yet."""

    plan: Plan
    folder: Path
    judging: Judging
    argv: list[str]
    started_ns: int
    reference: Plan | None = None
    fail_fast: bool = False
    on_hang: str = "kill"


def _batched(plan: Plan) -> bool:
    """Whether it becomes a job of its own, which can be submitted together with others."""
    return plan.slurm is not None and not plan.slurm.allocation


@dataclass
class Session:
    """Runs jobs one after another on one supervisor, so that warm servers are reused."""

    live: Live
    supervisor: Launching
    command: Any  # (plan, folder) -> (argv, environment): driver.command
    watch: Any  # (folder, plan) -> Watching
    cwd: Path
    interrupts: Interrupts = field(default_factory=Interrupts)
    cores: int = field(default_factory=replay.num_cores)
    slurm: Submitting | None = None
    detach: bool = False
    suspected: set[str] = field(default_factory=set)  # codes shown while the present run went on
    suspicious: bool = True  # says what looks wrong while a run goes on; else each is judged once, at its end
    while_loading: Callable[[], None] | None = None  # once, while the first run loads torch and we would only wait

    def run(self, jobs: Sequence[tuple[Job, Judging]]) -> list[Result]:
        """All jobs, until the user interrupts. The report of each is complete before the next begins; Slurm gets all of its at once."""
        results: list[Result] = []
        with self.interrupts.caught(), self._closing():
            ready = [self._prepare(job, judging) for job, judging in jobs if _batched(job.plan)] if len(jobs) > 1 else []
            if self.slurm is not None and len(ready) > 1:
                self.slurm.submit([(prepared.plan, prepared.folder) for prepared in ready])
            waiting = {id(prepared.plan): prepared for prepared in ready}
            for job, judging in jobs:
                if self.interrupts.signal is not None and id(job.plan) not in waiting:
                    break
                prepared = waiting.get(id(job.plan))
                results.append(self._carry(prepared) if prepared is not None else self.run_one(job, judging))
        return results

    def attach(self, folder: replay.Folder) -> Result:
        """Follows a run on Slurm that an earlier controller left, to its end."""
        reference = rundir.read_plan(inner) if ((inner := folder.path / rundir.REFERENCE_DIR) / protocol.PLAN_FILE).is_file() else None
        started_ns = folder.report.get("started_ns")
        prepared = Prepared(
            folder.plan, folder.path, folder.judging, list(folder.command), started_ns if isinstance(started_ns, int) else 0, reference
        )
        with self.interrupts.caught(), self._closing():
            return self._carry(prepared)

    def run_one(self, job: Job, judging: Judging) -> Result:
        return self._carry(self._prepare(job, judging))

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            (self.slurm or self.supervisor).close()
            self.supervisor.close()

    def _prepare(self, job: Job, judging: Judging) -> Prepared:
        """The run folder with the plan and a report that says "running": there before anything is started."""
        plan, started_ns = job.plan, time.time_ns()
        folder = rundir.create(plan.scenario.name, job.settings["out"], self.cwd)
        argv = self._write_plan(plan, folder, judging)
        try:
            rundir.write_json(folder / protocol.REPORT_FILE, {**report_json.running(plan, argv, started_ns), "controller": _identity()})
        except OSError as error:
            raise UsageError(f"{folder} cannot be written: {(error.strerror or str(error)).lower()}; name another folder with --out") from None
        if job.reference is not None and plan.launcher == "slurm":  # made by the job itself, in the same allocation
            self._write_plan(job.reference, rundir.create_reference(folder), judging)
        return Prepared(plan, folder, judging, argv, started_ns, job.reference, job.settings["fail_fast"], job.settings["on_hang"])

    def _carry(self, run: Prepared) -> Result:
        self.live.begin(run.plan)
        self.suspected.clear()
        ending = self.supervise(run.plan, run.folder, run.judging, fail_fast=run.fail_fast, on_hang=run.on_hang)
        if ending.reason == DETACHED:
            return self._leave(run, ending)
        if run.reference is not None and ending.reason == "exited" and all(e.code == 0 for e in ending.exits) and ending.started:
            try:
                left = self._run_reference(run.reference, run.folder, run.judging)
            except (OSError, UsageError) as error:  # the run itself is there to be judged
                self.live.note(f"no reference run: {str(error).lower()}")
            else:
                if left.reason == DETACHED:
                    return self._leave(run, left)
        return self._settle(run.plan, run.folder, ending, run.judging, run.argv, run.started_ns)

    def _leave(self, run: Prepared, ending: Ending) -> Result:
        """The job goes on; nothing is judged, so this is never 0."""
        self.live.end()
        report = {**report_json.running(run.plan, run.argv, run.started_ns), "status": DETACHED}
        rundir.write_json(run.folder / protocol.REPORT_FILE, report)
        code = self.interrupts.code or errors.EXIT_NOTHING_CHECKED
        return Result(Verdict(run.plan, (), (), code, {}, ending), report, run.folder, console.header(run.plan, console.Style()))

    def _write_plan(self, plan: Plan, folder: Path, judging: Judging) -> list[str]:
        try:
            argv, env = self.command(plan, folder)
        except ValueError as error:
            raise UsageError(str(error)) from None
        rundir.write_plan(folder, plan, argv, env, judging=report_json.plain(judging), num_cores=self.cores)
        return list(argv)

    def _run_reference(self, plan: Plan, folder: Path, judging: Judging) -> Ending:
        """The same script with as many processes as its header says, for the comparison; its output stays in its own log."""
        inner = folder / rundir.REFERENCE_DIR
        argv = self._write_plan(plan, rundir.create_reference(folder), judging) if not inner.is_dir() else []
        self.live.note(f"reference run: the same script as {count(plan.nproc, 'process')}; --no-reference leaves it out")
        ending = self.supervise(plan, inner, judging, quiet=True)
        report = {**report_json.running(plan, argv, time.time_ns()), "status": "done", "ending": report_json.plain(ending)}
        if ending.reason != DETACHED:
            rundir.write_json(inner / protocol.REPORT_FILE, report)
        return ending

    def _settle(self, plan: Plan, folder: Path, ending: Ending, judging: Judging, argv: list[str], started_ns: int) -> Result:
        self.live.end()
        run = replay.read_run(folder, plan, ending, self.cores)
        verdict = replay.settle(run, judging, self.interrupts.code)
        report = report_json.finished(run, verdict, argv, started_ns)
        from harness.checks.engine import explained_by  # as replay does: the checks are read while the ranks run

        unsaid = self.suspected.difference(*((f.code, *f.consequences) for f in verdict.findings))
        folded = {code: cause for code in unsaid if (cause := explained_by(code, verdict.findings)) is not None}
        self.live.folded(folded)
        self.live.taken_back(unsaid - folded.keys(), verdict.outcomes)
        try:
            if ending.reason == "folder-deleted":  # made again for the report alone: a verdict has to lie somewhere
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write_plan(plan, folder, judging)
            rundir.write_last(folder / protocol.REPORT_FILE, report)
        except (OSError, UsageError) as error:  # the disk is full by now: the verdict is printed all the same
            self.live.note(f"report.json could not be written: {(getattr(error, 'strerror', None) or str(error)).lower()}")
        self.live.block("\n" + console.render(run, verdict, folder, str(self.cwd), self.live.style))
        plain_text = console.header(plan, console.Style()) + "\n\n" + console.render(run, verdict, folder, str(self.cwd), console.Style())
        return Result(verdict, report, folder, plain_text)

    # ---- one run, from its start to its ending

    def supervise(
        self, plan: Plan, folder: Path, judging: Judging, *, fail_fast: bool = False, quiet: bool = False, on_hang: str = "kill"
    ) -> Ending:
        """Launch, then look every 0.1 s until nothing of the run is left."""
        begun = time.monotonic()
        try:
            launching = self.slurm if plan.launcher == "slurm" and self.slurm is not None else self.supervisor
            handle = launching.run(plan, folder)
        except OSError as error:
            return Ending(reason="launch-failed", started=False, launcher_error=str(error))
        look = Look(self, plan, folder, judging, fail_fast=fail_fast, quiet=quiet, on_hang=on_hang, begun=begun)
        if launching is self.slurm:
            gone = self.interrupts.signal in (signal.SIGINT, signal.SIGHUP) and not self.interrupts.again  # left at an earlier element of the array
            look.queue = Queue(cast(Queued, handle), plan, folder, self.live, detach=self.detach or gone, quiet=quiet)
        while True:
            ending = handle.poll()
            if ending is None and look.leaves():
                return cast(Queue, look.queue).left()
            look.script_output(final=ending is not None)
            if ending is not None:
                self.live.end()
                return look.complete(ending)
            if look.reason is None and look.reason_to_stop(launched=bool(handle.pids)):
                handle.stop(str(look.reason))
            look.say_fallback(handle.fallback)
            launching.rest(POLL_S)


def _identity() -> dict[str, int]:
    """Pid and start time of this controller: how `harness report` tells a run that goes on from one that was killed."""
    return {"pid": os.getpid(), "start_ticks": procfs.start_ticks(os.getpid())}

