"""SYN108 registration-order-differs: ranks register the same parameters in another order

What it does
    Compares the names of the parameters, in the order in which DDP sees them, across ranks.

Why it is bad
    DDP pairs parameters by position. Where shapes agree, layer a of one rank is averaged with layer b of another, without a word.

Wrong
    if rank == 0: self.a = nn.Linear(8, 8); self.b = nn.Linear(8, 8)
    else:         self.b = nn.Linear(8, 8); self.a = nn.Linear(8, 8)

Right
    self.a = nn.Linear(8, 8)
    self.b = nn.Linear(8, 8)

Known limits
    Compares names; two layers of one name and another meaning are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class RegistrationOrderDiffers(Check):
    code = "SYN108"
    name = "registration-order-differs"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "SYN109", "SYN125", "SYN129")

    def end(self, run: Run) -> Iterable[Finding]:
        columns = replicas.wrapping(run)
        first = columns[0][1]["names"]
        for rank, event in columns[1:]:
            names = event["names"]
            if names != first and sorted(names) == sorted(first):
                at = next(i for i, (a, b) in enumerate(zip(first, names, strict=True)) if a != b)
                yield self.finding(
                    f"rank {rank} registers its parameters in another order than rank {columns[0][0]}: DDP averages "
                    f"`{first[at]}` with `{names[at]}`",
                    where=event.where,
                    ranks=(columns[0][0], rank),
                    notes=[f"position {at} of {len(names)}"],
                    help="define the layers in one order on every rank (no `if rank`, no set or dict order that depends on the process)",
                )
                return
