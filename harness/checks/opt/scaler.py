"""OPT109 scaler-diverges: ranks scale their losses by different factors

What it does
    Compares the GradScaler's scale at each step.

Why it is bad
    The averaged gradient mixes scales: it is divided by a factor that fits none of the ranks.

Wrong
    scaler = GradScaler(init_scale=2.0 ** (10 + rank))

Right
    scaler = GradScaler()                 # the same on every rank; overflow is found after the all-reduce, alike

Known limits
    Needs a GradScaler.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class ScalerDiverges(Check):
    code = "OPT109"
    name = "scaler-diverges"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "OPT103")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        used = False
        for step in run.steps():
            scales = step.number("scale")
            used = used or any(scales)
            if step.complete and len(set(scales)) > 1:
                made = {e["scale"] for _, e in run.events("scaler_made")}
                yield self.finding(
                    f"ranks scale the loss by different factors at step {step.index}: {', '.join(f'{s:g}' for s in scales)}",
                    where=replicas.first_where(run, "scaler_made" if len(made) > 1 else "scaler") or facts.grad_site(0),
                    ranks=replicas.majority_out(scales) or run.rank_ids,
                    help="construct GradScaler alike on every rank and update it after the gradients were averaged",
                )
                return
        if not used:
            raise NotApplicable("no GradScaler is used")
