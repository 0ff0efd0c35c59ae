"""SYN114 trainable-outside-ddp: trained parameters that no DDP owns

What it does
    Looks for parameters of an optimizer that belong to no DDP object, in a job whose other parameters do, and whose gradients or
    values differ between ranks.

Why it is bad
    A loss head, a temperature, an embedding beside the wrapped model is trained on each rank's own gradient and drifts apart.

Wrong
    model = DDP(backbone)
    opt = SGD([*model.parameters(), *head.parameters()])

Right
    model = DDP(nn.Sequential(backbone, head))

Known limits
    Parameters that are averaged by hand are equal at the step: silent. So are those that one rank owns (tables or experts of a model that is
    split over the ranks): no other rank has a parameter of their name, or rows travel by all_to_all and the ranks' parameters differ from
    the start.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import regime
from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class TrainableOutsideDdp(Check):
    code = "SYN114"
    name = "trainable-outside-ddp"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        for opt, parting in sorted(facts.partings.items()):
            event = facts.params_event(opt, step=parting.grad_step if parting.grad_step is not None else parting.param_step)
            if event is None:
                continue
            outside = [n for n, w in zip(event["names"] or (), event["ddp"] or (), strict=False) if w == -1]
            wrong = [n for n in outside if n in set(parting.grad_names) | set(parting.param_names)]
            if wrong and regime.by_rows(run) and not replicas.starts_equal(run, opt):
                continue
            if wrong and (parting.num_grad or parting.num_param):
                yield self.finding(
                    f"{len(wrong)} trained parameters belong to no DDP object and differ between ranks: {replicas.listed(wrong)}",
                    where=event.where,
                    ranks=run.rank_ids,
                    notes=[f"first at step {parting.grad_step if parting.grad_step is not None else parting.param_step}"],
                    help="wrap one module that holds all trained parameters, or wrap this part in a DDP of its own",
                )
                return
