"""EVL122 blank-average: averaged weights are evaluated with the statistics of an untrained model.

What it does
    Looks at models that the script evaluates and does not train itself, where batch normalisation has weights that follow training (they move
    from evaluation to evaluation or from step to step, or are those of a trained model), and running statistics that are still those of the
    constructor: mean 0, variance 1, no batch seen. A warning.

Why it is bad
    Running statistics are buffers, not parameters: an average (EMA, a teacher, a copy for evaluation) that walks over `parameters()` leaves them
    behind. In eval mode every layer behind the normalisation then sees other inputs than in training, and the averaged model scores far
    below the one that it averages.

Wrong
    for mine, theirs in zip(average.parameters(), model.parameters()):
        mine.lerp_(theirs, 1 - decay)

Right
    for mine, theirs in zip(average.parameters(), model.parameters()):
        mine.lerp_(theirs, 1 - decay)
    for mine, theirs in zip(average.buffers(), model.buffers()):
        mine.copy_(theirs)

Known limits
    Silent where the average was made from a model that had seen batches: its statistics are old ones then, and look like any others. Weights that never
    move are those of a network drawn at random, or of a file whose statistics are folded in.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import told
from harness.checks.base import Check
from harness.model import Finding, Severity
from harness.record import Run, number


class BlankAverage(Check):
    code = "EVL122"
    name = "blank-average"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        found = told.of(run, "untracked")
        if not found:
            return
        event = found[0][1]
        yield self.finding(
            f"{event['module']} is evaluated with trained weights and blank statistics: {number(event['num'])} normalisation layers still have "
            "mean 0 and variance 1",
            where=event.where,
            ranks=sorted({rank for rank, _ in found}),
            notes=["running statistics are buffers: a loop over parameters() does not reach them"],
            help="copy the buffers with the weights: `for mine, theirs in zip(average.buffers(), model.buffers()): mine.copy_(theirs)`; torch's "
            "AveragedModel has use_buffers=True, or update_bn() for it",
        )
