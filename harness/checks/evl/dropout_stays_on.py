"""EVL114 dropout-stays-on: a functional dropout without `training=` is active while the model is evaluated

What it does
    Looks for calls of F.dropout that leave `training` at its default, in a method of a module that is in eval mode, with gradients off.

Why it is bad
    The default is True. eval() switches nn.Dropout off and knows nothing of this call: validation and predictions are noisy and too low.

Wrong
    x = F.dropout(x, p=0.5)

Right
    x = F.dropout(x, p=0.5, training=self.training)            # or nn.Dropout(0.5) in __init__

Known limits
    Monte-Carlo dropout says `training=True` and is silent. A call outside a module's method is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import told
from harness.checks.base import Check
from harness.model import Finding, Severity
from harness.record import Run


class DropoutStaysOn(Check):
    code = "EVL114"
    name = "dropout-stays-on"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        found = told.of(run, "dropout_always")
        if not found:
            return
        event = found[0][1]
        yield self.finding(
            f"F.{event['function']} is active while {event['module']} is in eval mode: `training` is left at its default, True",
            where=event.where,
            ranks=sorted({rank for rank, _ in found}),
            help=f"pass `training=self.training`, or use an nn.{str(event['function']).capitalize()} that eval() switches off",
        )
