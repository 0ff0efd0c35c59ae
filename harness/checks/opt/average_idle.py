"""OPT134 average-outruns-steps: an average of the weights is updated several times for each optimizer step

What it does
    For models beside the trained one, of its shapes and without gradients (an EMA, a teacher, a target network): looks at how often they move between
    two optimizer steps. A finding where they come nearer to the weights, window after window, while these stand still.

Why it is bad
    Under gradient accumulation the update stands in the loop over micro-batches instead of under the optimizer's step. The same weights are
    averaged in again and again: with A micro-batches the decay is the A-th power of what is written there, and the average is hardly one.

Wrong
    for i, batch in enumerate(loader):
        (loss(batch) / accumulate).backward()
        if (i + 1) % accumulate == 0: optimizer.step(); optimizer.zero_grad()
        ema.update(model)

Right
        if (i + 1) % accumulate == 0: optimizer.step(); optimizer.zero_grad(); ema.update(model)

Known limits
    Needs a model as the average (copy.deepcopy, AveragedModel), on the CPU, and six such windows within the first 256 backwards; a dict of tensors is
    not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import told
from harness.checks.base import Check
from harness.model import Finding, Severity
from harness.record import Run, where_of


class AverageOutrunsSteps(Check):
    code = "OPT134"
    name = "average-outruns-steps"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        found = told.of(run, "average_idle")
        if not found:
            return
        event = found[0][1]
        made = where_of(event["made"])
        yield self.finding(
            f"the average of the weights ({event['module']}) moves {event['moves']} times for each optimizer step, {event['idle']} of them while the "
            "weights stand still",
            where=event.where,
            ranks=sorted({rank for rank, _ in found}),
            notes=[
                f"{event['backwards']} backwards a step; seen in {event['windows']} windows between two steps",
                *([f"the average is made at {made.place}"] if made is not None else []),
            ],
            help="update the average where the optimizer has stepped, once for each step",
        )
