"""OUT101 collective-under-rank-0: a collective is called by some ranks only, and the run hung or broke there

What it does
    Looks for the collective in which ranks wait, and whether other ranks ever came to that statement.

Why it is bad
    A collective needs every rank. Under `if rank == 0:` the others go on to the next one, or to the end: a hang, or a closed
    connection.

Wrong
    if rank == 0:
        dist.barrier()
        save(model)

Right
    if rank == 0: save(model)
    dist.barrier()

Known limits
    A broadcast whose source and receivers stand on two lines is healthy. Silent where the run ended well.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.record import Run


class CollectiveUnderRank0(Check):
    code = "OUT101"
    name = "collective-under-rank-0"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "LAU124", "SYN122", "SYN123")

    def end(self, run: Run) -> Iterable[Finding]:
        pairs = pairing.of(run)
        broke = run.ending.reason == "hang" or any(e.code for e in run.ending.exits)
        if not broke:
            raise NotApplicable("the run ended well")
        if any(e["world"] is False for r in run.present for e in r.of("coll")):
            raise NotApplicable("collectives of subgroups are in use")
        for rank, column in zip(pairs.ranks, pairs.columns, strict=True):
            for n, event in enumerate(column):
                only = pairing.only_on(pairs, event)
                others = [c for c in pairs.columns if len(c) > n]
                if len(only) == len(pairs.ranks) or (event["op"] in pairing.ROOTED and len(others) == len(pairs.ranks)):
                    continue
                if all(c[n]["op"] == event["op"] for c in others) and len(others) == len(pairs.ranks):
                    continue
                missing = [r for r in pairs.ranks if r not in only]
                if not pairing.passed_by(run, missing, event):
                    continue
                yield self.finding(
                    f"{event['op']} is called on ranks {', '.join(map(str, only))} only; ranks {', '.join(map(str, missing))} never come to this statement",
                    where=event.where,
                    ranks=only,
                    notes=[f"collective {n} of rank {rank}"],
                    help="call the collective on every rank: move it out of the rank-dependent branch",
                )
                return
