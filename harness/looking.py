"""The watch over one run: what it printed, how far it is, whether there is a reason to end it or to leave it alone."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from harness import attempt, errors, replay, rundir
from harness.model import Ending, Finding, Plan, RankStacks, Scheduler, Severity
from harness.probe import protocol
from harness.queueing import Queue
from harness.replay import Judging
from harness.report import console
from harness.report import json as report_json
from harness.report.live import Live, Tail

WATCH_EVERY_S = 0.5
LAUNCH_LIMIT_S = 300.0  # importing torch on a loaded machine or a slow disk takes minutes at worst
SUSPECT_EVERY_S = 2.0
SUSPECT_SHARE = 0.05  # of one core: the live judgement reads whole recordings, so it waits 20 times as long as it took,
SUSPECT_AT_LEAST_EVERY_S = 20.0  # but a finding that comes a minute late helps nobody
SIGNAL_CODES = {signal.SIGINT: errors.EXIT_SIGINT, signal.SIGTERM: errors.EXIT_SIGTERM, signal.SIGHUP: errors.EXIT_SIGTERM}


class Watching(Protocol):
    """Progress of one run (harness/watch)."""

    def line(self) -> str: ...
    def silent_s(self) -> float: ...
    def stalled_s(self) -> float: ...
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


class Desk(Protocol):
    """What the watch needs of the session."""

    live: Live
    watch: Any  # (folder, plan) -> Watching
    interrupts: Interrupts
    cores: int
    suspected: set[str]
    suspicious: bool
    while_loading: Callable[[], None] | None


class Look:
    """The watch over one run: what it printed, how far it is, whether there is a reason to end it."""

    def __init__(
        self, session: Desk, plan: Plan, folder: Path, judging: Judging, *, fail_fast: bool, quiet: bool, on_hang: str, begun: float
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
        self._errors: set[tuple[str, object]] = set()  # at the last look for suspects
        self._hang_after_s = self._stalled_s = 0.0
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
        """Whether nothing runs yet, or no more: our own limits do not count then."""
        if queue.requeued():
            self._start_over(queue.attempt)
        if queue.settles:
            return True
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
            self.reason = self._at_the_limit()
        elif now >= self._next_watch:
            self._next_watch = now + WATCH_EVERY_S
            self._look_at_progress(now)
        if self.reason is None and now >= self._next_suspects and not self.quiet:
            self._look_for_suspects()
        return self.reason is not None

    def _at_the_limit(self) -> str:
        """A run that was called hung (--on-hang dump), and has not moved since, hangs: the limit is only what ended it."""
        self._hang_after_s = self._watch.silent_s() if self._dumped else 0.0
        return "hang" if self._hang_after_s else "timeout"

    def _out_of_time(self, now: float) -> bool:
        """The wall limit is the script's: it counts from the first rank, not from the start of the servers that preload torch for it."""
        if self._launched_at is None:
            return now - self.begun > max(LAUNCH_LIMIT_S, self.plan.timeout_s)
        return now - self._launched_at > self.plan.timeout_s

    def _look_at_progress(self, now: float) -> None:
        silent_s = self._watch.silent_s()
        self._stalled_s = self._watch.stalled_s()
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
        ending = Ending(reason="hang", hang_after_s=silent_s, stacks=stacks, scheduler=Scheduler(attempt=self.queue.attempt) if self.queue else None)
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
        if not (self.session.suspicious or self.fail_fast):
            self._next_suspects = math.inf
            return None
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
        if self.fail_fast and self._is_certain(found):
            self.reason = "fail-fast"
        return None

    def _is_certain(self, found: Sequence[Finding]) -> bool:
        """An error that the look before saw too, and that nothing to come can take back: the newest rows are not there on all ranks yet."""
        before, self._errors = self._errors, {(f.code, f.where) for f in found if f.severity is Severity.ERROR}
        return any(code not in replay.provisional_codes() for code, _ in self._errors & before)

    def _suspect(self, finding: Finding) -> None:
        key = (finding.code, finding.where)
        if finding.severity > Severity.ADVICE and key not in self._suspected:
            self._suspected.add(key)
            self.session.suspected.add(finding.code)
            self.session.live.suspect(finding)

    def complete(self, ending: Ending) -> Ending:
        """The supervisor's ending, with what only the watch knows."""
        reason = self.reason or ending.reason
        hang_after_s = self._hang_after_s or (self._stalled_s if reason == "timeout" else 0.0)
        return replace(ending, reason=reason, hang_after_s=hang_after_s, stacks=self._stacks)
