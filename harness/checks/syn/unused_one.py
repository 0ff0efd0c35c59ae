"""SYN111 unused-on-one-rank: a parameter is used on some ranks only

What it does
    Compares the set of parameters without a gradient across ranks, for models in DDP without find_unused_parameters; and the set of
    those whose gradient the script sets to None between backward and step.

Why it is bad
    A branch that depends on the rank or on its data leaves one rank's reducer waiting: one rank fails, the others see a closed
    socket.

Wrong
    if rank == 0: out = out + self.extra(x)

Right
    out = out + self.extra(x)            # on every rank, or DDP(net, find_unused_parameters=True)

Known limits
    With find_unused_parameters=True DDP handles it: silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class UnusedOnOneRank(Check):
    code = "SYN111"
    name = "unused-on-one-rank"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "LAU101", "LAU102", "HNG*", "SYN110")

    def end(self, run: Run) -> Iterable[Finding]:
        event = replicas.strict_wrap(run)
        columns = replicas.ungraded(run)
        if len(columns) < 2 or all(set(c) == set(columns[0]) for c in columns):
            yield from self._taken(run)
            return
        every, shared = set().union(*columns), set(columns[0]).intersection(*columns[1:])
        names = sorted(every - shared)
        without = [rank for rank, c in enumerate(columns) if set(c) & set(names)]
        yield self.finding(
            f"{len(names)} parameters receive a gradient on some ranks only: {replicas.listed(names)}",
            where=replicas.loss_site(run) or event.where,
            ranks=without,
            notes=[f"no gradient on ranks {', '.join(map(str, without))}", *replicas.failure_note(run)],
            help="use the same branches on every rank, or construct DDP with find_unused_parameters=True",
        )

    def _taken(self, run: Run) -> Iterable[Finding]:
        """Gradients that came on every rank and that the script took away on some."""
        columns = replicas.taken_away(run)
        differ = set[tuple[int, str]]().union(*columns) - set[tuple[int, str]].intersection(*columns) if len(columns) > 1 else set()
        if not differ:
            return
        names = sorted({name for _, name in differ})
        without = [rank for rank, c in enumerate(columns) if c & differ]
        yield self.finding(
            f"the gradients of {len(names)} parameters are set to None before the step on some ranks only: {replicas.listed(names)}",
            where=replicas.of(run).grad_site(0, min(step for step, _ in differ)),
            ranks=without,
            notes=[f"they were there after the backward; gone at step {min(step for step, _ in differ)} on ranks {', '.join(map(str, without))}"],
            help="drop the same gradients on every rank: draw the choice from a generator that all ranks seed alike",
        )
