"""SYN127 replicas-diverge: replicas differ and no known cause was found

What it does
    The last resort: parameters that should be identical (in DDP, or equal at the start with equal gradients at first) differ
    after a step.

Why it is bad
    From there on every rank trains another model.

Wrong
    (many)

Right
    (compare the first differing parameter and step in the notes with what the script does there)

Known limits
    Parameters that are averaged from time to time by design (LocalSGD) are not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas, rounding
from harness.model import Finding, Severity
from harness.record import Run


class ReplicasDiverge(Check):
    code = "SYN127"
    name = "replicas-diverge"
    severity = Severity.ERROR
    explains = ("OPT114",)

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        if any(True for _ in run.events("join")):
            raise NotApplicable("Join is in use: ranks may take different numbers of steps")
        for opt, parting in sorted(facts.partings.items()):
            names = [n for n in (parting.grad_names or parting.param_names) if not facts.wrapped or n in facts.ddp_names(opt)]
            hand = (
                not facts.wrapped and facts.hand_synced_numel and replicas.starts_equal(run, opt) and parting.num_grad <= parting.steps // 2
            )
            if parting.num_param and names and (facts.wrapped or hand) and facts.same_opts:
                rounding.require_more(run, parting)
                what = "gradients" if parting.grad_step is not None else "parameters"
                yield self.finding(
                    f"replicas part at step {parting.grad_step if parting.grad_step is not None else parting.param_step}: "
                    f"{what} of {replicas.listed(names)} differ",
                    where=facts.grad_site(opt, parting.grad_step),
                    ranks=run.rank_ids,
                    notes=[
                        f"{parting.num_grad} of {parting.steps} steps with differing gradients, {parting.num_param} with "
                        "differing parameters"
                    ],
                    help="see what the script does to these parameters at that step on one rank only",
                )
                return
