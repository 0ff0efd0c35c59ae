"""HNG103 collectives-do-not-match: ranks wait in different collectives.

What it does
    In a run that stands still, at least two ranks wait for each other in calls that cannot meet: another operation, or the same one at
    another line while nobody else is missing. An error.

Why it is bad
    A collective ends when all ranks have called it. Ranks that took different branches wait for ever, each for the call that the other
    skipped.

Wrong
    if rank == 0:
        dist.broadcast(stats, src=0)      # rank 1 is already in the next all_reduce

Right
    dist.broadcast(stats, src=0)          # on every rank

Known limits
    Says where the ranks are, not why they parted. The cause may lie earlier: batches that differ in number, a decision that each rank
    takes alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.hng import waits
from harness.model import Finding, Severity
from harness.record import Run


class CollectivesDoNotMatch(Check):
    code = "HNG103"
    name = "collectives-do-not-match"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "LAU101", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if not (found := waits.require_hang(run)):
            return
        waiting = [w for w in found if w.peers and w.op != "init"]
        if len({(w.op, w.place) for w in waiting}) < 2:
            return
        if len({w.op for w in waiting}) == 1 and any(not w.peers and w.op != "ended" for w in found):
            return  # one call on two lines (an if/else around it) can meet: it waits for those who are elsewhere
        odd = waits.odd_one_out(waiting)
        yield self.finding(
            f"ranks wait in collectives that cannot meet: {waits.describe(waiting)}",
            where=odd.where,
            ranks=[w.rank for w in waiting],
            notes=waits.notes(found),
            help="make every rank call the same collectives in the same order: take this call out of the branch, or add it "
            "to the other one",
        )
