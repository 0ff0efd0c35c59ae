"""OPT106 sum-loss-under-ddp: the loss is a sum over the batch, and DDP averages over ranks

What it does
    Looks at the operation that made the loss that backward() is called on, and at whether the gradients are rescaled before the
    step.

Why it is bad
    DDP divides by the world size. The gradient of a sum over the global batch comes out world_size times too small: a learning
    rate tuned on one process is wrong on N.

Wrong
    loss = F.cross_entropy(out, y, reduction='sum')

Right
    loss = F.cross_entropy(out, y)        # mean; or multiply the sum by world_size / global_batch

Known limits
    A sum that is divided or multiplied afterwards, or whose gradients are rescaled before the step, is healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.syn import gradients, replicas
from harness.model import Finding, Severity
from harness.record import Run, where_of


class SumLoss(Check):
    code = "OPT106"
    name = "sum-loss-under-ddp"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        losses = [(r, e) for r, e in run.events("loss")]
        stepping = {(w.file, w.line) for _, e in run.events("accumulation") for site, _ in e["sites"] or () if (w := where_of(site))}
        sums = [
            (r, e)
            for r, e in losses
            if e["reduction"] == "sum" and not e["scaled"] and e.where and (e.where.file, e.where.line) in stepping
        ]
        places = {(e.where.file, e.where.line) for _, e in sums if e.where}
        mixed = any(e["reduction"] != "sum" and e.where and (e.where.file, e.where.line) in places for _, e in losses)
        if not sums or not facts.num_reduce or mixed:
            return
        if any(e["joined"] for _, e in sums):
            raise Inconclusive("the loss joins the ranks by a collective of its own: what it sums over is not the local batch alone")
        if gradients.rescaled(run):
            raise NotApplicable("gradients are rescaled between the backward and the step")
        yield self.finding(
            f"the loss is a sum over the local batch; DDP divides its gradient by {run.world_size}",
            where=where_of(sums[0][1]["made"]) or sums[0][1].where,
            ranks=replicas.rank_list([r for r, _ in sums]),
            notes=[f"operations at the root: {', '.join(sums[0][1]['root'] or ())}"],
            help="use the mean, or multiply the loss by dist.get_world_size()",
        )
