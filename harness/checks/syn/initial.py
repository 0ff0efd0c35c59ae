"""SYN129 initial-parameters-differ: replicas that are synced by hand do not start from the same parameters

What it does
    In a job without DDP whose gradients agree at the steps, compares the parameters before the first step.

Why it is bad
    Averaging gradients keeps replicas equal only if they start equal. Each rank follows the common gradient from a place of its
    own.

Wrong
    model = Net()                        # seeded by nobody, broadcast by nobody

Right
    for p in model.parameters(): dist.broadcast(p.data, src=0)

Known limits
    Optimizers whose gradients differ too are judged by SYN126 and SYN128.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class InitialDiffers(Check):
    code = "SYN129"
    name = "initial-parameters-differ"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        if facts.wrapped:
            raise NotApplicable("a model is wrapped in DistributedDataParallel: it broadcasts")
        for opt, parting in sorted(facts.partings.items()):
            columns = replicas.initial(run, opt)
            synced = parting.num_grad < parting.steps or facts.hand_synced_numel
            if len(set(columns)) > 1 and parting.num_param == parting.steps and synced and parting.num_grad <= parting.steps // 10:
                event = facts.params_event(opt)
                yield self.finding(
                    "gradients are synchronised by hand, but the ranks' parameters differ from the start",
                    where=event.where if event else None,
                    ranks=run.rank_ids,
                    notes=[f"gradients agree at {parting.steps - parting.num_grad} of {parting.steps} steps, parameters at none"],
                    help="broadcast the parameters from rank 0 before training, or seed every rank alike before building the model",
                )
                return
