"""OPT103 lr-diverges: ranks step with different hyper-parameters

What it does
    Compares lr, weight decay, betas and momentum of every group across ranks at each step.

Why it is bad
    Gradients agree, the update does not: the replicas part. Typical is a schedule driven by a rank's own progress or metric.

Wrong
    scheduler.step(val_loss)              # each rank's own val_loss

Right
    dist.all_reduce(val_loss, op=dist.ReduceOp.AVG)
    scheduler.step(val_loss)

Known limits
    Optimizers on ranks that train different models, or that never share a gradient (population based training), are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import gradients, replicas
from harness.model import Finding, Severity
from harness.record import Run


class LrDiverges(Check):
    code = "OPT103"
    name = "lr-diverges"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "OPT114", "EVL103")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        for opt, parting in sorted(facts.partings.items()):
            if parting.hyper_step is None or (
                parting.num_grad and parting.grad_step is not None and parting.grad_step < parting.hyper_step
            ):
                continue
            if not facts.num_reduce and parting.num_grad >= 0.9 * parting.steps and not gradients.ever_agree(run):
                raise NotApplicable("the ranks never share a gradient: each trains a member of its own, at its own rate")
            lrs = optimizers.lr_at(run, parting.hyper_step)
            site = replicas.odd_site(list(run.events("scheduler")), run.world_size) or replicas.first_where(run, "scheduler")
            event = facts.params_event(opt)
            yield self.finding(
                f"ranks step with different hyper-parameters from step {parting.hyper_step} on: lr {', '.join(f'{v:.6g}' for v in lrs)}",
                where=site or (event.where if event else None),
                ranks=replicas.majority_out(lrs) or run.rank_ids,
                notes=["gradients agree there"] if parting.grad_step is None or parting.grad_step >= parting.hyper_step else [],
                help="drive the schedule by something all ranks share: the step count, or a metric that was all-reduced",
            )
            return
