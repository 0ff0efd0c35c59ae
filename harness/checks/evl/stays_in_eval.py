"""EVL105 stays-in-eval: after an evaluation the model is never put back into train mode.

What it does
    Finds steps whose backward ran while the model was in eval mode, after steps in train mode, on all ranks, to the end of the run; for
    models with Dropout or BatchNorm.

Why it is bad
    Dropout is off and BatchNorm normalises with frozen statistics from the first evaluation on. The run looks healthy and overfits.

Wrong
    for epoch in range(epochs):
        train_one_epoch(model); evaluate(model)          # evaluate() calls model.eval()

Right
    for epoch in range(epochs):
        model.train()
        train_one_epoch(model); evaluate(model)

Known limits
    A model that is trained in eval mode from the start, or whose layers are frozen one by one, is taken as meant. One rank alone in eval
    mode is SYN120.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.evl import layers
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Run

MIN_STEPS = 2


class StaysInEval(Check):
    code = "EVL105"
    name = "stays-in-eval"
    severity = Severity.ERROR
    explains = ("SYN120",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not run.present or not layers.sensitive(run):
            raise NotApplicable("no model with Dropout or BatchNorm is trained")
        starts = []
        for rank, recording in enumerate(run.ranks):
            if recording is None:
                continue
            flags = [bool(row.flags & protocol.FLAG_EVAL) for row in recording.all_rows()]
            if not flags:
                raise NotApplicable("no step was taken")
            first = flags.index(True) if True in flags else len(flags)
            if first in (0, len(flags)) or not all(flags[first:]):
                return
            starts.append((rank, first, len(flags)))
        if any(num - first < MIN_STEPS for _, first, num in starts):
            raise Inconclusive("the run ended right after a switch to eval mode")
        _, first, num = starts[0]
        yield self.finding(
            f"steps {first} to {num - 1} were trained in eval mode: nothing called train() after the evaluation",
            where=_switched_at(run, first),
            ranks=[r for r, _, _ in starts],
            notes=[f"{num - first} of {num} steps; {layers.told(run)}"],
            help="call `model.train()` at the start of every training epoch",
        )


def _switched_at(run: Run, step: int) -> Where | None:
    """The eval() that was never taken back."""
    for recording in run.present:
        switched = [e for e in recording.of("mode") if not e["training"] and 0 < e.step <= step]
        if switched:
            return switched[-1].where
    return None
