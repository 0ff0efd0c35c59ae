"""SYN136 gathered-into-one-tensor: the results of all ranks are written into one tensor, so only the last one is left

What it does
    Looks at the list that is given to all_gather, gather or all_to_all for the results: whether its entries are one and the same tensor.

Why it is bad
    `[tensor] * n` is a list of n references to one tensor. Each rank's result overwrites the one before; a mean over the list is the value
    of one rank, and the others' data is thrown away. Nothing complains.

Wrong
    parts = [torch.empty_like(grad)] * world_size
    dist.all_gather(parts, grad)

Right
    parts = [torch.empty_like(grad) for _ in range(world_size)]
    dist.all_gather(parts, grad)

Known limits
    The first 3,000 collectives of a rank are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run


class GatheredIntoOneTensor(Check):
    code = "SYN136"
    name = "gathered-into-one-tensor"
    severity = Severity.ERROR
    explains = ("SYN124", "SYN127", "SYN133", "EVL107")

    def end(self, run: Run) -> Iterable[Finding]:
        gathers = [(rank, e) for rank, e in run.events("coll") if e["op"] in ("all_gather", "gather", "all_to_all")]
        if not gathers:
            raise NotApplicable("nothing is gathered into a list of tensors")
        wrong = [(rank, e) for rank, e in gathers if e["aliased"] is True]
        if wrong:
            first = wrong[0][1]
            yield self.finding(
                f"{first['op']} writes the results of all ranks into one tensor: the list holds it several times",
                where=first.where,
                ranks=sorted({rank for rank, _ in wrong}),
                notes=[f"{len(wrong)} of {len(gathers)} calls"],
                help="make a tensor for each rank: `[torch.empty_like(t) for _ in range(world_size)]`, not `[...] * world_size`",
            )
