"""HNG101 hang: the run stands still.

What it does
    When nothing moves any more, the stacks of all ranks are taken before they are ended. The finding says what each rank waits in and
    where. An error. More specific codes of this family and of others take its place where the cause is known.

Why it is bad
    A hung job holds its machines until somebody looks, and the logs say nothing: the last lines printed are healthy.

Wrong
    if rank == 0:
        dist.barrier()        # the others never come

Right
    dist.barrier()            # every rank, in the same order

Known limits
    A rank that computes for minutes between two steps looks like a hang to the eye; it is one only if all others wait for it as long.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.hng import waits
from harness.model import Finding, Severity
from harness.record import Run


class Hang(Check):
    code = "HNG101"
    name = "hang"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if not (found := waits.require_hang(run)):
            return
        alone = [w for w in found if not w.peers and w.op != "ended"]
        apart = alone if 0 < len(alone) < len(found) else []  # they do something of their own, the others wait for them
        first = apart[0] if apart else waits.odd_one_out([w for w in found if w.op != "ended"])
        yield self.finding(
            f"the run stands still: {waits.describe(found)}",
            where=first.where,
            ranks=[w.rank for w in apart or found],
            notes=waits.notes(found),
            help="look at this line: every rank has to reach the same collectives in the same order",
        )
