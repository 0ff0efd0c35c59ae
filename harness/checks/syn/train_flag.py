"""SYN120 train-flag-differs: a model is in train mode on some ranks and in eval mode on others

What it does
    Compares the training flags of all modules that own trained parameters, at every step.

Why it is bad
    Dropout and BatchNorm behave differently; parameters and losses stay plausible and equal, so nothing else shows it.

Wrong
    if rank == 1: model.eval()

Right
    model.train()                         # on every rank

Known limits
    Modes are compared at optimizer steps only.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class TrainFlagDiffers(Check):
    code = "SYN120"
    name = "train-flag-differs"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        wrong = [s for s in run.steps() if s.complete and not s.same("train") and len(set(s.number("opt"))) == 1]
        if len(wrong) < 2:
            return
        out = replicas.majority_out([r.train if r else 0 for r in wrong[0].rows])
        modes = [(rank, e) for rank, e in run.events("mode")]
        site = replicas.odd_site(modes, run.world_size)
        yield self.finding(
            f"the modules' train and eval flags differ between ranks at {len(wrong)} steps, the first is step {wrong[0].index}",
            where=site or facts.grad_site(wrong[0].number("opt")[0]),
            ranks=out or run.rank_ids,
            help="call model.train() and model.eval() on every rank alike",
        )
