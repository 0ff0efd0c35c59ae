"""EVL123 zip-drops-the-tail: lists of different length are gathered from the ranks and put together by zip()

What it does
    Compares the lengths of the lists that the ranks give to one gather of objects, where the source puts the parts together by `zip(*parts)` and reads
    them nowhere else. A warning at the zip where the lengths differ.

Why it is bad
    zip() ends with the shortest list: the last samples of the other ranks are lost without a word. The file of predictions has too few lines, and
    the metric leaves samples out.

Wrong
    dist.all_gather_object(parts, mine)
    predictions = list(chain.from_iterable(zip(*parts)))

Right
    dist.all_gather_object(parts, mine)
    predictions = [p for p in chain.from_iterable(zip_longest(*parts, fillvalue=None)) if p is not None]

Known limits
    The first call of each statement is looked at. Tuples of the same fields from each rank, which zip() turns over, have one length, and are healthy.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run, number, where_of


class ZippedParts(Check):
    code = "EVL123"
    name = "zip-drops-the-tail"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        tables = [{e.where: e for e in r.of("gathered") if e["zipped"] and e.where is not None} for r in run.present]
        if len(tables) < 2 or not (any(tables) or any(e["strict"] for _, e in run.events("gathered"))):
            raise NotApplicable("no gathered lists are put together by zip()")
        for at in tables[0]:
            calls = [t[at] for t in tables if at in t]
            if len(calls) == run.world_size and (found := self._compared(run, calls)) is not None:
                yield found
                return

    def _compared(self, run: Run, calls: list[Event]) -> Finding | None:
        lengths = [number(e["items"]) for e in calls]
        lost = sum(lengths) - min(lengths) * len(lengths)
        if not lost or not min(lengths):
            return None
        return self.finding(
            f"zip() ends with the shortest of the ranks' lists: {lost} of {sum(lengths)} gathered items are lost",
            where=where_of(calls[0]["zipped"]),
            ranks=run.rank_ids,
            notes=[f"the ranks' lists have {', '.join(map(str, lengths[:8]))} items"],
            help="itertools.zip_longest and leave the filling out, or sort by the samples' numbers",
        )
