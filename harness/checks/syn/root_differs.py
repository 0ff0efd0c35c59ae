"""SYN139 collective-root-differs: ranks name different sources, or destinations, for one collective

What it does
    Pairs the n-th collective of every rank, as long as they are the same calls, and compares `src` of a broadcast or scatter and `dst` of a
    reduce or gather.

Why it is bad
    A broadcast has one source, and all ranks have to name the same. With `src=rank` each rank sends its own tensor and nobody receives any:
    the replicas keep what they had, or the run stands still.

Wrong
    dist.broadcast(p.data, src=rank)

Right
    dist.broadcast(p.data, src=0)

Known limits
    Collectives of subgroups are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.hng import waits
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.record import Event, Run


class CollectiveRootDiffers(Check):
    code = "SYN139"
    name = "collective-root-differs"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "SYN126", "SYN127", "SYN128", "SYN129", "OPT111", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        pairs = pairing.of(run)
        if not any(isinstance(e["root"], int) for column in pairs.columns for e in column):
            raise NotApplicable("no collective with a source or a destination")
        for n in range(pairs.shortest):
            events = pairs.at(n)
            if len({(e["op"], e["numel"], pairing.site_key(e)) for e in events}) > 1:
                return  # the ranks have parted before, or come from different lines: not the same call
            roots = [e["root"] for e in events]
            if all(isinstance(root, int) for root in roots) and len(set(roots)) > 1:
                yield self.finding(
                    f"{_said(pairs.ranks, events)}",
                    where=events[0].where,
                    ranks=pairs.ranks,
                    notes=[f"collective {n} of the run", *waits.standing(run)],
                    help="name one rank, the same on all of them: `src=0`",
                )
                return


def _said(ranks: Sequence[int], events: Sequence[Event]) -> str:
    op, roots = events[0]["op"], [e["root"] for e in events]
    sends = op.startswith(("broadcast", "scatter"))
    end = "source" if sends else "destination"
    if roots == list(ranks):
        return f"each rank is the {end} of its own {op}: nobody {'receives' if sends else 'sends'} anything"
    odd = next(i for i, root in enumerate(roots) if root != roots[0])
    return f"the ranks name different {end}s for one {op}: rank {roots[0]} on rank {ranks[0]}, rank {roots[odd]} on rank {ranks[odd]}"
