"""SYN124 gradient-sum-not-averaged: hand-synced gradients are summed and never divided by the world size

What it does
    Compares sampled gradient values after the backward, on all ranks, with those at the optimizer step: the step's are the ranks'
    sum, although the loss is a mean and bears no factor.

Why it is bad
    The step is world_size times too large: the run needs another learning rate with every number of processes, and differs from
    one process on the same global batch.

Wrong
    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)

Right
    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    p.grad /= dist.get_world_size()

Known limits
    A loss that already bears a factor (divided by the world size, or by the global batch) is not judged. Sees the first six
    steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import gradients, replicas
from harness.model import Finding, Severity
from harness.record import Run


class GradientSum(Check):
    code = "SYN124"
    name = "gradient-sum-not-averaged"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        replicas.require(run)
        losses = [e for _, e in run.events("loss")]
        if losses and all(e["scaled"] or e["reduction"] == "sum" for e in losses):
            raise NotApplicable("the loss bears a factor of its own, which may stand for the division")
        ratios = gradients.ratios(run)
        if not ratios:
            raise NotApplicable("gradients are not synced by hand, or not seen before the sync")
        sums = [r for r in ratios if abs(r - 1.0) < 1e-3]
        if len(sums) >= max(2, 0.9 * len(ratios)):
            reductions = [e for _, e in run.events("coll")]
            where = next((e.where for e in reductions if e["grad"]), None) or next(
                (e.where for e in reductions if e["op"] in ("all_reduce", "reduce")), None
            )
            yield self.finding(
                f"synced gradients are the sum over {run.world_size} ranks, not the mean",
                where=where,
                ranks=run.rank_ids,
                severity=None if all(e["reduction"] == "mean" for e in losses) else Severity.WARNING,
                notes=[
                    f"gradient at the step = {sum(sums) / len(sums):.3f} x the sum of the ranks' own gradients, in {len(sums)} comparisons"
                ],
                help=f"divide after the all_reduce: `param.grad /= dist.get_world_size()` (here {run.world_size})",
            )
