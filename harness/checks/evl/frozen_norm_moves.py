"""EVL118 frozen-norm-moves: a frozen part is put back into train mode by train() of the whole model, and its BatchNorm statistics move

What it does
    Follows parts of a trained model that the script freezes and puts into eval mode. Where a train() of a module around such a part puts it
    back, and running statistics of its BatchNorm layers, whose parameters are frozen, then move in training steps, that is a warning at this
    train().

Why it is bad
    `requires_grad = False` does not hold a BatchNorm's running mean and variance: they drift with every batch, and the frozen part is no longer
    the one that was trained. In train mode it normalises by the batch besides.

Wrong
    for p in model.backbone.parameters(): p.requires_grad = False
    model.backbone.eval()
    for epoch in range(epochs):
        model.train()                          # the backbone as well

Right
        model.train()
        model.backbone.eval()

Known limits
    Silent where the script never put the part into eval mode by itself, where it was evaluated then (a validation), and where no parameters of
    the layers are frozen. Advice where the part was frozen after its eval(), which another function called than the train(): that one may have been meant for
    something else.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run, where_of


class FrozenNormMoves(Check):
    code = "EVL118"
    name = "frozen-norm-moves"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(not e["training"] for _, e in run.events("mode")):
            raise NotApplicable("no model was put into eval mode")
        found = sorted(run.events("frozen_moves"), key=lambda one: not one[1]["frozen"])
        if not found:
            return
        first = found[0][1]
        train = where_of(first["train"])
        line = f"line {first.where.line}" if first.where is not None else "the script"
        yield self.finding(
            f"train() of the whole model takes back the eval() of its frozen {first['module']}: the running statistics of "
            f"{first['norms']} BatchNorm layers move",
            where=train or first.where,
            ranks=sorted({rank for rank, _ in found}),
            notes=[f"{line} put it into eval mode; the statistics moved in each of {first['steps']} steps looked at"],
            help="call eval() of the frozen part after every train() of the model, or override train() in the model",
            severity=None if first["frozen"] else Severity.ADVICE,
        )
