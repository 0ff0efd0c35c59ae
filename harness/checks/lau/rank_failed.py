"""LAU101 rank-failed: a rank ended with an exception or a non-zero exit code.

What it does
    Takes the failures that each rank wrote where the exception was raised, before any clean-up, and blames the earliest that is not the
    mere consequence of another rank's end. An error: the training did not finish.

Why it is bad
    When one rank fails, the others lose their connection and fail too, often earlier in the launcher's eyes. Its "root cause" then names
    a victim, and the search begins at the wrong line.

Wrong
    x = batch["image"]       # KeyError on rank 1 only; rank 0 dies of "connection closed by peer"

Right
    fix the line that the finding names, not the one in the launcher's summary

Known limits
    Some causes are named beside the exception: a folder that another rank of the job had made a moment before (`exist_ok=True`), a tensor
    that a module keeps as a plain attribute, which `.to()` neither moves nor casts (`register_buffer`), a process group that was destroyed
    too early; there the finding stands where that was done. What the best known texts of torch mean in a distributed script is told with
    them: it follows from the text alone, and the line stays the one that raised. A rank that ends by `os._exit` without an exception tells
    no line. Clocks of several nodes may differ by some milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame, causes
from harness.model import Finding, Severity, Where
from harness.record import Run

OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|MemoryError|cannot allocate memory", re.IGNORECASE)


class RankFailed(Check):
    code = "LAU101"
    name = "rank-failed"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU122", "LAU124", "LAU121")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live and not any(True for _ in blame.failures(run)):
            raise NotApplicable("no rank has failed so far")
        fall = blame.culprit(run)
        if fall is None or fall.kind == "signal":
            return
        notes = blame.others(run, fall)
        if fall.victim:
            notes.append("every failure says that a peer went away: which rank left first is not in the recording")
        cause = causes.of(run, fall)
        yield self.finding(
            f"rank {fall.rank} failed with {fall.headline}" if fall.event is not None else self._by_code(run, fall),
            where=(cause.where if cause is not None else None) or fall.where or self._exit_site(run, fall),
            ranks=[fall.rank],
            notes=[*([cause.note] if cause is not None else []), *notes],
            help=cause.help if cause is not None else self._help(fall),
        )

    def _by_code(self, run: Run, fall: blame.Fall) -> str:
        code = fall.exit.code if fall.exit is not None else 1
        last = [line.strip() for line in run.logs.get(fall.rank, "").splitlines() if line.strip()]
        said = f"; its last line is: {last[-1][:200]}" if last else ""
        return f"rank {fall.rank} ended with exit code {code} and no exception{said}"

    def _exit_site(self, run: Run, fall: blame.Fall) -> Where | None:
        if fall.event is not None:  # torch's own SIGCHLD handler may raise it where no line of the user's is on the stack
            recording = run.ranks[fall.rank] if 0 <= fall.rank < len(run.ranks) else None
            loaders = recording.of("loader") if recording is not None and "DataLoader worker" in fall.headline else []
            return loaders[-1].where if loaders else None
        call = blame.exit_call(run, fall)
        return call.where if call is not None else None

    def _help(self, fall: blame.Fall) -> str:
        if OUT_OF_MEMORY.search(fall.headline):
            return "lower the batch size or the model's memory on this rank; the memory figures of the report show where it went"
        if fall.event is None:
            return "the script ended itself: do what its last words say; the end of its output stands at the top of the report"
        return "fix this line; the traceback of this rank stands at the top of the report"
