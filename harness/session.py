"""The only orchestrator: plan > launch > watch > check > report, for one script after another."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from harness import attempt, errors, replay, rundir
from harness.errors import UsageError
from harness.model import Ending, Finding, Plan, RankStacks, Severity, Verdict
from harness.planning import Job
from harness.probe import protocol
from harness.queueing import DETACHED, Queue, Queued
from harness.replay import Judging
from harness.report import console
from harness.report import json as report_json
from harness.report.live import Live, Tail
from harness.report.text import count

POLL_S = 0.1
WATCH_EVERY_S = 0.5
LAUNCH_LIMIT_S = 300.0  # importing torch on a loaded machine or a slow disk takes minutes at worst
SUSPECT_EVERY_S = 2.0
SUSPECT_SHARE = 0.05  # of one core: the live judgement reads whole recordings, so it waits 20 times as long as it took,
SUSPECT_AT_LEAST_EVERY_S = 20.0  # but a finding that comes a minute late helps nobody
SIGNAL_CODES = {signal.SIGINT: errors.EXIT_SIGINT, signal.SIGTERM: errors.EXIT_SIGTERM, signal.SIGHUP: errors.EXIT_SIGTERM}


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


class Watching(Protocol):
    """Progress of one run (harness/watch)."""

    def line(self) -> str: ...
    def silent_s(self) -> float: ...
    def stacks(self) -> Sequence[RankStacks]: ...


class Interrupts:
    """The first signal that asked us to end, and whether it was said twice; a handler does nothing else."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.again = False

    def _on_signal(self, number: int, _frame: Any) -> None:
        self.again = self.signal is not None
        self.signal = self.signal or number

    @contextmanager
    def caught(self) -> Iterator[Interrupts]:
        heard = [number for number in SIGNAL_CODES if signal.getsignal(number) is not signal.SIG_IGN]  # nohup, and shells' background jobs
        previous = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def code(self) -> int | None:
        return None if self.signal is None else SIGNAL_CODES[signal.Signals(self.signal)]


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
            look.queue = Queue(cast(Queued, handle), plan, folder, self.live, detach=self.detach, quiet=quiet)
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


class Look:
    """The watch over one run: what it printed, how far it is, whether there is a reason to end it."""

    def __init__(
        self, session: Session, plan: Plan, folder: Path, judging: Judging, *, fail_fast: bool, quiet: bool, on_hang: str, begun: float
    ) -> None:
        self.session, self.plan, self.folder, self.judging, self.on_hang = session, plan, folder, judging, on_hang
        self.fail_fast, self.quiet, self.begun = fail_fast, quiet, begun
        self.foreground = plan.launcher == "inline"  # the script has the terminal itself
        self.reason: str | None = None
        self.queue: Queue | None = None
        self._place = folder  # of the attempt that is looked at
        self._launched_at: float | None = None
        self._tail = Tail(folder / protocol.LOG_DIR / "rank0.log")
        self._watch: Watching = session.watch(folder, plan)
        self._next_watch = self._next_suspects = begun
        self._suspected: set[tuple[str, object]] = set()
        self._hang_after_s = 0.0
        self._stacks: tuple[RankStacks, ...] = ()
        self._fallback_said = False
        self._dumped = False

    def script_output(self, final: bool) -> None:
        if not self.quiet and not self.foreground:
            self.session.live.script(0, self._tail.lines(final))

    def say_fallback(self, why: str) -> None:
        if why and not self._fallback_said:
            self._fallback_said = True
            self.session.live.note(f"warm ranks cannot be had here ({why}); the real torchrun takes their place")

    def leaves(self) -> bool:
        """Whether a run on Slurm is to go on without us."""
        interrupts = self.session.interrupts
        return self.queue is not None and self.reason is None and self.queue.leaves(interrupts.signal, interrupts.again)

    def _interrupted(self) -> bool:
        interrupts = self.session.interrupts
        if self.queue is not None:
            return self.queue.cancels(interrupts.signal, interrupts.again)
        return interrupts.signal is not None

    def _in_queue(self, queue: Queue, now: float) -> bool:
        """Whether nothing runs yet: our own limits do not count then."""
        if queue.requeued():
            self._start_over(queue.attempt)
        if not queue.waits:
            return False
        self.begun = now
        if queue.waited_too_long():
            self.reason = "pending"
        elif now >= self._next_watch:
            self._next_watch = now + WATCH_EVERY_S
            self.session.live.progress(queue.line(), 0.0)
        return True

    def _start_over(self, number: int) -> None:
        self._place = attempt.folder_of(self.folder, number)
        self._tail = Tail(self._place / protocol.LOG_DIR / "rank0.log")
        self._watch = self.session.watch(self._place, self.plan)
        self._launched_at = None
        self._suspected.clear()

    def reason_to_stop(self, launched: bool) -> bool:
        """Sets `reason`: interrupted, timeout, hang, fail-fast or, in a queue, pending."""
        now = time.monotonic()
        if not self._interrupted() and self.queue is not None and self._in_queue(self.queue, now):
            return self.reason is not None
        if launched and self._launched_at is None:
            self._launched_at = now
        if self._interrupted():
            self.reason = "interrupted"
        elif self._out_of_time(now):
            self._stacks = self._ask_for_stacks()
            self.reason = "timeout"
        elif now >= self._next_watch:
            self._next_watch = now + WATCH_EVERY_S
            self._look_at_progress(now)
        if self.reason is None and now >= self._next_suspects and not self.quiet:
            self._look_for_suspects()
        return self.reason is not None

    def _out_of_time(self, now: float) -> bool:
        """The wall limit is the script's: it counts from the first rank, not from the start of the servers that preload torch for it."""
        if self._launched_at is None:
            return now - self.begun > max(LAUNCH_LIMIT_S, self.plan.timeout_s)
        return now - self._launched_at > self.plan.timeout_s

    def _look_at_progress(self, now: float) -> None:
        silent_s = self._watch.silent_s()
        if silent_s > 0 and self.on_hang == "kill":
            self._hang_after_s = silent_s
            self._stacks = self._ask_for_stacks()
            self.reason = "hang"
        elif silent_s > 0 and not self._dumped:
            self._dump(silent_s)
        elif not self.foreground:
            self._dumped = self._dumped and silent_s > 0  # it moved again: the next standstill is another one
            name = "reference: " if self.quiet else ""
            self.session.live.progress(name + self._watch.line(), now - self.begun)

    def _dump(self, silent_s: float) -> None:
        """Tells who waits where, and lets the run go on: `--on-hang dump`."""
        self._dumped = True
        stacks = self._ask_for_stacks()
        ending = Ending(reason="hang", hang_after_s=silent_s, stacks=stacks)
        with suppress(OSError):
            rundir.write_json(self.folder / f"hang-{time.strftime('%H%M%S')}.json", report_json.plain(ending))
        self.session.live.note(f"nothing has moved for {silent_s:.0f} s; the run goes on (--on-hang dump), its stacks are in the run folder")
        for finding in replay.hang_findings(self.folder, self.plan, self.judging, ending, self.session.cores):
            self.session.live.block("\n".join(console.finding_lines(finding, self.session.live.style, self.session.live.cwd)))

    def _ask_for_stacks(self) -> tuple[RankStacks, ...]:
        try:
            return tuple(self._watch.stacks())
        except OSError:  # the request file could not be written
            return ()

    def _look_for_suspects(self) -> None:
        if self._launched_at is None:  # nothing is recorded yet
            replay.substantial_codes()  # imports the checks, 0.5 s, while the servers import torch
            call, self.session.while_loading = self.session.while_loading, None
            return call() if call is not None else None
        before_s = time.process_time()  # not wall time: on a busy machine the ranks would decide how rarely we look
        try:
            found = replay.suspects(self.folder, self.plan, self.judging, self.session.cores, self.queue.attempt if self.queue else 0)
        except Exception as error:  # a provisional judgement must not end the user's run; the final one will tell
            self._next_suspects = math.inf
            return self.session.live.note(f"no more suspects while this runs: {type(error).__name__}: {error}")
        took_s = time.process_time() - before_s
        self._next_suspects = time.monotonic() + min(max(SUSPECT_EVERY_S, took_s / SUSPECT_SHARE), SUSPECT_AT_LEAST_EVERY_S)
        for finding in found:
            self._suspect(finding)
        if self.fail_fast and any(f.severity is Severity.ERROR for f in found):
            self.reason = "fail-fast"
        return None

    def _suspect(self, finding: Finding) -> None:
        key = (finding.code, finding.where)
        if finding.severity > Severity.ADVICE and key not in self._suspected:
            self._suspected.add(key)
            self.session.live.suspect(finding)

    def complete(self, ending: Ending) -> Ending:
        """The supervisor's ending, with what only the watch knows."""
        return replace(ending, reason=self.reason or ending.reason, hang_after_s=self._hang_after_s, stacks=self._stacks)


def _identity() -> dict[str, int]:
    """Pid and start time of this controller: how `harness report` tells a run that goes on from one that was killed."""
    return {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 where there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
