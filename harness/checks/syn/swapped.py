"""SYN121 collective-order-swapped: ranks issue the same collectives in another order

What it does
    Pairs the n-th collective of every rank and looks for two statements that appear in one order on some ranks and in the other
    on others.

Why it is bad
    Two all_reduce calls of one size pair up whatever they carry: the loss of one rank is added to the accuracy of another,
    without a word.

Wrong
    for name in set(metrics): dist.all_reduce(metrics[name])

Right
    for name in sorted(metrics): dist.all_reduce(metrics[name])

Known limits
    Two tensors that are reduced by one statement in another order are seen only where their sizes differ.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.record import Run


class CollectiveOrderSwapped(Check):
    code = "SYN121"
    name = "collective-order-swapped"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "SYN118", "SYN123", "SYN127", "SYN128")

    def end(self, run: Run) -> Iterable[Finding]:
        pairs = pairing.of(run)
        for n in range(pairs.shortest - 1):
            for i in range(1, len(pairs.ranks)):
                one, other = pairs.columns[0], pairs.columns[i]
                if one[n]["op"] != other[n]["op"]:
                    return
                m = pairing.swapped_with(one, other, n)
                if m is not None:
                    what = pairing.called(one[n], other[n])
                    yield self.finding(
                        f"ranks {pairs.ranks[0]} and {pairs.ranks[i]} issue two {one[n]['op']} calls in opposite order",
                        where=other[n].where,
                        ranks=(pairs.ranks[0], pairs.ranks[i]),
                        notes=[f"collective {n}: {what[0]} on rank {pairs.ranks[0]} meets {what[1]} on rank {pairs.ranks[i]}"],
                        help=(
                            "issue collectives in one order on every rank: sort what you iterate over, take no rank-dependent "
                            "branch around them"
                        ),
                    )
                    return
