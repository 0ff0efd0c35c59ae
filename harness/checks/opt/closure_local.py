"""OPT120 closure-decides-per-rank: an optimizer that decides by its closure's loss is given another loss on every rank

What it does
    Looks at optimizers that call a closure and search along it (LBFGS): replicas that start equal, whose gradients are synced, and part all
    the same, while the losses of their closures differ. An error, at the closure's backward.

Why it is bad
    The line search takes other decisions on every rank. The models part, and as soon as one rank evaluates the closure more often than
    another, its collectives meet the wrong ones of the others: wrong numbers, then a hang.

Wrong
    def closure():
        ...
        average_gradients(model)
        return loss                        # this rank's own

Right
    def closure():
        ...
        average_gradients(model)
        total = loss.detach().clone(); dist.all_reduce(total)
        return total / world_size

Known limits
    What the closure returns is not seen; that it decides is known of LBFGS by name only.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run


class ClosureDecidesPerRank(Check):
    code = "OPT120"
    name = "closure-decides-per-rank"
    severity = Severity.ERROR
    explains = ("OPT111", "SYN127", "HNG*", "LAU101", "LAU102", "OUT101", "SYN122", "SYN123")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        searching = {e["opt"] for _, e in run.events(protocol.PARAMS) if "LBFGS" in str(e["kind"])}
        if not searching:
            raise NotApplicable("no optimizer that searches along a closure")
        for opt, parting in sorted(facts.partings.items()):
            first = min((s for s in (parting.param_step, parting.full_step) if s is not None), default=None)
            if opt not in searching or first is None or first == 0 or not replicas.starts_equal(run, opt) or not facts.hand_synced_numel:
                continue
            losses = [r.row(i).loss for r in run.present if (i := r.step_index.get(first)) is not None]
            if len(set(losses)) > 1:
                yield self.finding(
                    f"the models part at step {first} although their gradients are synced: the closure's losses differ by rank "
                    f"({', '.join(f'{v:.4g}' for v in losses[:4])}), and the line search decides by them",
                    where=facts.grad_site(opt, first),
                    ranks=run.rank_ids,
                    notes=[f"equal before step {first} of {parting.steps}"],
                    help="all-reduce the loss as well and return the mean of all ranks from the closure",
                )
                return
