"""MEM108 threads-pile-up: one statement starts a thread again and again, and they stay, all waiting at the same line.

What it does
    Looks twice a second at the threads that the script's own code has started. Four and more of one statement that stand at the same line of the
    script's, in a wait of `queue` or `threading` without a timeout that has not moved for a second, started in four different steps up to the second half of the
    run, are advice; six and more are a warning.

Why it is bad
    Each keeps its stack and all that it holds: the queue with its batches, the iterator of the loader, its open files. None of that is ever given
    back, and after hours there is no memory or no thread left. A loop that is left by `break` ends no thread that fills a queue for it.

Wrong
    def __iter__(self):
        threading.Thread(target=fill, daemon=True).start()
        while (batch := box.get()) is not end:
            yield batch                             # `break` in the caller: fill() waits in box.put() for ever

Right
        try:
            while (batch := box.get()) is not end:
                yield batch
        finally:
            closed.set()                            # fill() looks at it between `box.put(batch, timeout=0.1)`
            worker.join()

Known limits
    Threads of a pool that nobody closes stand in no line of the script's, and are not seen. Neither are those that wait in a system call, or for a
    lock. One that waits with a timeout ends by itself for all that is known, and is not counted, even if it waits so again and again. A number of
    threads that is reached in the first half of the run is taken for one that stays.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number, where_of

MIN_NUM, MANY = 4, 6


class ThreadsPileUp(Check):
    code = "MEM108"
    name = "threads-pile-up"
    severity = Severity.WARNING
    explains = ("MEM103", "MEM104", "MEM105")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live:
            raise NotApplicable("the run has not ended")  # which steps are late is not known before
        if not any(r.num_rows for r in run.present):
            raise NotApplicable("no rank took an optimizer step")
        found = [(rank, e) for rank, r in enumerate(run.ranks) if r is not None for e in _latest(r) if _piles_up(r, e)]
        if not found:
            return
        _, worst = max(found, key=lambda one: number(one[1]["num"]))
        started = where_of(worst["started_at"])
        yield self.finding(
            f"{worst['num']} threads of one statement wait at this line and do not move, and there are more and more of them",
            where=worst.where,
            ranks=sorted({rank for rank, e in found if e.where == worst.where}),
            severity=None if number(worst["num"]) >= MANY else Severity.ADVICE,
            notes=[
                f"started in {worst['steps']} different steps, the last one in step {worst['last']}",
                *([f"started at line {started.line}: {started.text}"] if started is not None else []),
            ],
            help="end the thread where its consumer leaves: an event that it looks at between waits with a timeout, set and joined in a `finally`",
        )


def _latest(recording: Recording) -> Iterable[Event]:
    """The last word on each place."""
    return {(str(e["site"]), str(e["started_at"])): e for e in recording.of("threads_held")}.values()


def _piles_up(recording: Recording, event: Event) -> bool:
    """More and more: one for each of a fixed number of things, made when it is first needed, is there in the first half of a run."""
    late = 2 * number(event["last"]) >= recording.num_steps
    return event.where is not None and number(event["num"]) >= MIN_NUM and number(event["steps"]) >= MIN_NUM and late
