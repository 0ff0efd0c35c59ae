"""SYN109 shape-differs: ranks build models of different shapes

What it does
    Compares the names and shapes that each rank gives to DDP.

Why it is bad
    torch fails on one rank with a size mismatch and on the others with "connection closed".

Wrong
    hidden = 16 if rank == 0 else 12

Right
    hidden = 16                          # one configuration, read or broadcast from rank 0

Known limits
    Only DDP-wrapped models are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class ShapeDiffers(Check):
    code = "SYN109"
    name = "shape-differs"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU102", "HNG*", "SYN127", "SYN123")

    def end(self, run: Run) -> Iterable[Finding]:
        columns = replicas.wrapping(run)
        tables = [dict(zip(e["names"] or (), map(tuple, e["shapes"] or ()), strict=False)) for _, e in columns]
        for (rank, event), table in zip(columns[1:], tables[1:], strict=True):
            if table == tables[0]:
                continue
            names = sorted(set(tables[0]) | set(table))
            wrong = [n for n in names if tables[0].get(n) != table.get(n)]
            one, other = tables[0].get(wrong[0], "absent"), table.get(wrong[0], "absent")
            yield self.finding(
                f"the model differs between ranks: `{wrong[0]}` is {one} on rank {columns[0][0]} and {other} on rank {rank}",
                where=event.where,
                ranks=(columns[0][0], rank),
                notes=[f"{len(wrong)} parameters differ: {replicas.listed(wrong)}"],
                help="build the model from one configuration on every rank",
            )
            return
