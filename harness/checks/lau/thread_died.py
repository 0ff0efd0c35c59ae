"""LAU127 thread-died: a thread of a rank ended with an exception, and the rank went on without it.

What it does
    Names the line on which a thread that the script started died of an exception that nobody caught, on a rank that ended well all the same. A
    warning where the rank took training steps after that, else advice.

Why it is bad
    Python prints the traceback of a thread somewhere between the lines of the log, and the exit code stays 0. What the thread did (feeding data,
    writing checkpoints, sending metrics) is missing from there on.

Wrong
    threading.Thread(target=upload, args=(path,)).start()     # what it raises is nobody's

Right
    future = pool.submit(upload, path)
    ...
    future.result()                                           # raises here, in the main thread

Known limits
    A thread that ends a rank, or for which a rank waits for ever, is LAU101. Exceptions that a pool keeps are not seen before somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Event, Recording, Run

MAIN = "main"


class ThreadDied(Check):
    code = "LAU127"
    name = "thread-died"
    severity = Severity.WARNING
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live:
            raise NotApplicable("the run has not ended")
        well = {e.rank for e in run.ending.exits if e.code == 0}
        dead: dict[Where, list[tuple[int, Recording, Event]]] = {}
        for rank, recording in enumerate(run.ranks):
            if recording is not None and rank in well:
                for event in recording.of(protocol.FAILURE):
                    if _is_a_threads(event) and event.where is not None:
                        dead.setdefault(event.where, []).append((rank, recording, event))
        for where, found in dead.items():
            yield self._told(where, found)

    def _told(self, where: Where, found: list[tuple[int, Recording, Event]]) -> Finding:
        rank, recording, event = found[0]
        after = sum(1 for t in recording.column("t_ns") if t > event.t_ns)
        headline = blame.Fall(rank, event.t_ns, "exception", False, event).headline
        return self.finding(
            f"a thread of rank {rank} ({event['thread']}) ended with {headline}, and the rank went on without it",
            where=where,
            ranks=sorted({one for one, _, _ in found}),
            notes=[f"the rank took {after} step{'s' * (after != 1)} after that"],
            help="let the main thread see it: `future.result()` of a pool, or a queue that hands the exception over; or catch it in the thread",
            severity=Severity.WARNING if after else Severity.ADVICE,
        )


def _is_a_threads(event: Event) -> bool:
    """Not what it lost when a peer had ended: helpers of a store or a group die so while the run closes."""
    return event["thread"] not in (MAIN, None) and not blame.is_victim(event)
