"""SYN131 wrapped-twice: a model that is wrapped already is wrapped again.

What it does
    Looks at what DistributedDataParallel was given: a DistributedDataParallel over as many ranks is a warning.

Why it is bad
    Every gradient is averaged once for each wrapper: the results are right, the communication is paid again and again. Keys of the
    state_dict begin with `module.module.`, and no file of another run fits them. In a loop the wrappers pile up, and so do memory and time.

Wrong
    for epoch in range(epochs):
        model = DistributedDataParallel(model)     # of the one of the last epoch

Right
    model = DistributedDataParallel(net)           # once, before the loop

Known limits
    A wrapper inside a larger module, such as experts with a group of their own, is taken for meant.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run


class WrappedTwice(Check):
    code = "SYN131"
    name = "wrapped-twice"
    severity = Severity.WARNING
    explains = ("CKP103", "CKP104")

    def end(self, run: Run) -> Iterable[Finding]:
        wraps = list(run.events("wrap"))
        if not wraps:
            raise NotApplicable("no model is wrapped in DistributedDataParallel")
        again = [(rank, e) for rank, e in wraps if e["of_size"] is not None and e["of_size"] == e["group_size"]]
        if not again:
            return
        first = again[0][1]
        ranks = sorted({rank for rank, _ in again})
        num = sum(rank == ranks[0] for rank, _ in again)
        yield self.finding(
            f"a DistributedDataParallel is wrapped in another one{f', {num} times' if num > 1 else ''}",
            where=first.where,
            ranks=ranks,
            notes=[f"every gradient is averaged over the {first['group_size']} ranks once for each wrapper"],
            help="wrap the bare model, once: `model = DistributedDataParallel(net)` before the loop",
        )
