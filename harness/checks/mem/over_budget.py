"""MEM105 over-budget: a rank needs more memory than the user allows.

What it does
    Compares the peak of each rank (CUDA: allocated memory; else resident memory) with the budget of the run. An error, since the user set
    the limit.

Why it is bad
    The budget stands for the machine on which the training will run.

Wrong
    a batch that fits the workstation, not the card of the cluster

Right
    a smaller batch with accumulation, activation checkpointing, a lazy data set

Known limits
    Without a budget there is nothing to compare. Resident memory counts pages that processes share in each of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.mem.memory_imbalance import peak_bytes
from harness.model import Finding, Severity
from harness.record import Run


class OverBudget(Check):
    code = "MEM105"
    name = "over-budget"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        budget = run.plan.budget_bytes
        if not budget:
            raise NotApplicable("no memory budget is set")
        peaks = {rank: peak for rank, r in enumerate(run.ranks) if r is not None and (peak := peak_bytes(r)) > 0}
        if not peaks:
            raise NotApplicable("no rank told about its memory")
        over = {rank: peak for rank, peak in peaks.items() if peak > budget}
        if over:
            top = max(over, key=lambda rank: over[rank])
            yield self.finding(
                f"rank {top} needs {over[top] / 1e6:.0f} MB, the budget is {budget / 1e6:.0f} MB",
                ranks=sorted(over),
                notes=[", ".join(f"rank {rank} {peak / 1e6:.0f} MB" for rank, peak in sorted(peaks.items())[:8])],
                help="lower the batch size, accumulate gradients, or checkpoint activations",
            )
