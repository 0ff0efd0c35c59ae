"""OPT113 loss-does-not-fall: over the run the loss stays where it was, or rises.

What it does
    Takes the mean over the ranks at each step, and compares the medians of the first and the last third of the steps. The
    uncertainty of a median comes from the scatter of the values (1.25 x 1.48 x MAD / sqrt(n)). No fall of more than 1 % within
    twice the uncertainty is a finding: an error where the script's header declares `loss_falls = true`, else advice. A fall that
    drowns in noise is inconclusive. A loss that is exactly 0 at every step from the first on is a warning in any case.

Why it is bad
    A training that does not learn runs as fast as one that does.

Wrong
    optimizer = SGD(copy.deepcopy(model).parameters(), lr=0.1)

Right
    optimizer = SGD(model.parameters(), lr=0.1)

Known limits
    Needs 20 steps. With several optimizers (GANs) losses need not fall, and it does not apply. A run that resumes near its
    optimum is flat by nature.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.opt import losses
from harness.model import Finding, Severity
from harness.record import Run
from harness.steps import Step

MIN_STEPS = 20
MIN_FALL = 0.01
SMALL = 0.1  # of what it ends at, or of its scatter: no base for a percentage


class LossDoesNotFall(Check):
    code = "OPT113"
    name = "loss-does-not-fall"
    severity = Severity.ERROR
    symptom = True

    def __init__(self) -> None:
        self.points: list[losses.Point] = []

    def step(self, step: Step) -> None:
        point = losses.of_step(step)
        if point is not None:
            self.points.append(point)

    def end(self, run: Run) -> Iterable[Finding]:
        points = losses.finite(self.points)
        if not points:
            raise NotApplicable("no loss was seen")
        if len({p.opt for p in points}) > 1:
            raise NotApplicable("several optimizers take turns: their losses need not fall")
        if len(points) < MIN_STEPS:
            raise Inconclusive(f"needs {MIN_STEPS} steps, has {len(points)}")
        if not any(p.loss for p in points):
            yield self._zero(run, len(points))
            return
        third = len(points) // 3
        first, first_error = middle([p.loss for p in points[:third]])
        last, last_error = middle([p.loss for p in points[-third:]])
        scale = max(abs(first), abs(last), 1e-12)  # a loss that starts near 0 is no measure of what it rises to
        fall, error = (first - last) / scale, math.hypot(first_error, last_error) / scale
        if fall > max(2 * error, MIN_FALL):
            return
        if fall + 2 * error >= MIN_FALL and fall > -2 * error:
            raise Inconclusive(f"too noisy: it changed by {self._change(first, last, error * scale)}")
        declared = bool(run.expect.get("loss_falls"))
        recording = run.present[0] if run.present else None
        yield self.finding(
            f"the loss does not fall: {first:.4g} in the first third of {len(points)} steps, {last:.4g} in the last",
            where=losses.site(recording) if recording is not None else None,
            severity=None if declared else Severity.ADVICE,
            notes=[
                f"change {self._change(first, last, error * scale)}, medians of {third} steps each",
                "the script declares that it falls" if declared else "nothing is declared",
            ],
            help="check that the optimizer holds the model's parameters, the learning rate, and that inputs and targets belong together",
        )

    def _zero(self, run: Run, num: int) -> Finding:
        """Not a flat loss, none at all: its gradients are 0 as well."""
        return self.finding(
            f"the loss is exactly 0 at all of {num} steps: nothing is learned from it",
            where=losses.site(run.present[0]) if run.present else None,
            severity=Severity.WARNING,
            help="cross_entropy over a single class is 0 whatever the model says: take as many outputs as there are classes, or a loss that fits one output",
        )

    def _change(self, first: float, last: float, error: float) -> str:
        """In percent of where it began, or in its own unit where that is next to nothing."""
        if abs(first) <= SMALL * max(abs(last), error):
            return f"{last - first:+.3g} +- {error:.2g}"
        return f"{(last - first) / abs(first):+.1%} +- {error / abs(first):.1%}"


def middle(values: Sequence[float]) -> tuple[float, float]:
    """(median, its uncertainty)."""
    center = statistics.median(values)
    spread = statistics.median(abs(v - center) for v in values)
    return center, 1.25 * 1.4826 * spread / math.sqrt(len(values))
