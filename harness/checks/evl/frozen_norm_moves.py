"""EVL118 frozen-norm-moves: a frozen part is put back into train mode by train() of the whole model, and its BatchNorm statistics move or its dropout is on

What it does
    Follows parts of a trained model that the script freezes and puts into eval mode. Where a train() of a module around such a part puts it
    back, and running statistics of its BatchNorm layers, whose parameters are frozen, then move in training steps, that is a warning at this
    train(). So it is where the part is frozen as a whole and its dropout layers are called in train mode without gradients on the
    inputs that a trained layer gets too (a teacher's targets); else (features of a backbone) it is advice.

Why it is bad
    `requires_grad = False` does not hold a BatchNorm's running mean and variance: they drift with every batch, and the frozen part is no longer
    the one that was trained. In train mode it normalises by the batch besides. Dropout makes the targets of a teacher, or the features of a backbone, others
    for the same sample each time, with a part of its units at zero.

Wrong
    for p in model.backbone.parameters(): p.requires_grad = False
    model.backbone.eval()
    for epoch in range(epochs):
        model.train()                          # the backbone as well

Right
        model.train()
        model.backbone.eval()

Known limits
    Silent where the script never put the part into eval mode by itself (a mean teacher may stay in train mode on purpose), where it was evaluated then (a
    validation), and where no parameters of the layers are frozen. Dropout that is no layer (F.dropout, the dropout of nn.LSTM) is not seen. Advice where the
    part was frozen after its eval(), which another function called than the train(): that one may have been meant for something else.
    A teacher whose student gets other views of the data is told as advice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of


class FrozenNormMoves(Check):
    code = "EVL118"
    name = "frozen-norm-moves"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(not e["training"] for _, e in run.events("mode")):
            raise NotApplicable("no model was put into eval mode")
        moves = sorted(run.events("frozen_moves"), key=lambda one: not one[1]["frozen"])
        if moves:
            yield self._told(moves, f"the running statistics of {moves[0][1]['norms']} BatchNorm layers move", "the statistics moved", Severity.WARNING)
            return
        noise = sorted(run.events("frozen_noise"), key=lambda one: (not one[1]["frozen"], not _gives_targets(one[1])))
        if noise:
            first = noise[0][1]
            gives = "what it gives to the rest" if first["grad"] else "what it gives out, without gradients,"
            what = f"dropout is on in {first['drops']} of its layers, and {gives} is another for the same sample each time"
            yield self._told(noise, what, "they were called", Severity.WARNING if _gives_targets(first) else Severity.ADVICE)

    def _told(self, found: Sequence[tuple[int, Event]], what: str, happened: str, severity: Severity) -> Finding:
        first = found[0][1]
        train = where_of(first["train"])
        line = f"line {first.where.line}" if first.where is not None else "the script"
        return self.finding(
            f"train() of the whole model takes back the eval() of its frozen {first['module']}: {what}",
            where=train or first.where,
            ranks=sorted({rank for rank, _ in found}),
            notes=[f"{line} put it into eval mode; {happened} in each of {first['steps']} steps looked at"],
            help="call eval() of the frozen part after every train() of the model, or override train() in the model",
            severity=severity if first["frozen"] else Severity.ADVICE,
        )


def _gives_targets(noise: Event) -> bool:
    """It stands beside what is trained and not in front of it."""
    return bool(noise["beside"]) and not noise["grad"]
