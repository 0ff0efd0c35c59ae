"""OPT111 parameters-edited-on-one-rank: parameters changed on one rank outside the optimizer

What it does
    Looks for replicas whose gradients and hyper-parameters agree at every step so far and whose parameters differ.

Why it is bad
    An in-place edit under `if rank == ...`, a bad copy or a flipped bit: from there on that rank trains another model, while its
    gradients stay averaged.

Wrong
    if rank == 1: model.fc.weight.data[3, 3] += 0.01

Right
    with torch.no_grad(): model.fc.weight[3, 3] += 0.01   # on every rank

Known limits
    Large models are hashed in slices: an edit of one element can be seen some steps late. The optimizer's own state may be the
    cause too (CKP106).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas, rounding
from harness.model import Finding, Severity
from harness.record import Run


class EditedOnOneRank(Check):
    code = "OPT111"
    name = "parameters-edited-on-one-rank"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        for opt, parting in sorted(facts.partings.items()):
            first = min((s for s in (parting.param_step, parting.full_step) if s is not None), default=None)
            if first is None or not replicas.starts_equal(run, opt) or not (facts.ddp_names(opt) or facts.hand_synced_numel):
                continue
            if any(s is not None and s <= first for s in (parting.grad_step, parting.hyper_step)):
                continue
            rounding.require_more(run, parting)
            names = parting.param_names or replicas.final_names(run)
            yield self.finding(
                f"parameters differ from step {first} on although gradients and hyper-parameters agree: "
                f"{replicas.listed(names) if names else 'see notes'}",
                where=facts.grad_site(opt, first),
                ranks=run.rank_ids,
                notes=[f"first seen after step {first} of {parting.steps}"],
                help=(
                    "find what writes to these parameters on some ranks only (an edit, a copy, an optimizer state that "
                    "was loaded on one rank)"
                ),
            )
            return
