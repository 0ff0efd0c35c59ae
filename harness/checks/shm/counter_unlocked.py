"""SHM112 counter-without-lock: several processes add to one shared number without its lock

What it does
    Looks for statements that read and write a `multiprocessing.Value` (`counter.value += 1`) while neither its lock nor another one is held, in
    two or more processes at the same time.

Why it is bad
    Each access takes the lock, the addition does not: the read and the write are two of them, and what another process has written in
    between is lost. A budget of steps is overrun, and a schedule that follows the counter lags behind.

Wrong
    counter.value += 1

Right
    with counter.get_lock():
        counter.value += 1

Known limits
    A number that one process writes, one number for each process, and `Value(..., lock=False)` are not judged, nor is a statement under a `with`
    that may be a lock, under a condition in a loop with a `wait()`, or behind a loop that only waits: there processes may take turns. Tensors in
    shared memory are written without locks on purpose (hogwild).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run, number


class CounterWithoutLock(Check):
    code = "SHM112"
    name = "counter-without-lock"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        adds: dict[str, dict[int, list[Event]]] = {}
        for process in run.processes:
            for event in process.of("unlocked_add"):
                adds.setdefault(str(event["lock"]), {}).setdefault(process.pid, []).append(event)
        if not adds and not any(p.role == "child" and p.num_rows for p in run.processes):
            raise NotApplicable("the script made no process that trains")
        for by_process in adds.values():
            if any(_at_once(one, other) for one, other in combinations(by_process.values(), 2)):
                yield self._found(list(by_process.values()))
                return

    def _found(self, processes: list[list[Event]]) -> Finding:
        first = processes[0][0]
        return self.finding(
            f"{len(processes)} processes add to one shared number without its lock: what one writes between another's read and write is lost",
            where=first.where,
            ranks=[0],
            notes=[f"at least {sum(number(events[-1]['num']) for events in processes)} additions, in processes that ran at the same time"],
            help="hold the lock around the whole statement: `with counter.get_lock(): counter.value += 1`",
        )


def _at_once(one: list[Event], other: list[Event]) -> bool:
    """The times at which two processes add overlap."""
    return max(one[0].t_ns, other[0].t_ns) < min(one[-1].t_ns, other[-1].t_ns)
