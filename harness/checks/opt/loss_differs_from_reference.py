"""OPT114 loss-differs-from-reference: N ranks do not compute what one process computes.

What it does
    Compares the loss step by step with that of the reference run: the same script with fewer processes and the same global batch. Of N
    ranks the mean counts, weighted by samples. An error where the difference is beyond the tolerance in 3 steps in a row.

    The tolerance grows with the steps: 1e-5 x (steps + 1)^1.5 of the loss, at most 30 %. At the first step both runs have the same
    parameters and the same samples, and differ by the rounding of sums in another order (2e-7 measured in float32). Every step feeds that
    difference back into the parameters, where it can grow faster than linearly (ddp_cifar: 4e-7 after 60 steps; a model with kinks and a
    large learning rate: far more). A wrong scale, a wrong average or other samples are beyond it within a few steps.

Why it is bad
    Everything may run, and the loss may fall: the training is another one than was meant.

Wrong
    dist.all_reduce(p.grad)                                  # a sum, not a mean

Right
    dist.all_reduce(p.grad); p.grad /= world_size

Known limits
    Needs a header that says how the reference is run, and a script whose result does not depend on the number of ranks
    (GroupNorm, not BatchNorm; augmentation keyed by sample). Says that something differs, not what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.opt import losses
from harness.model import Finding, Severity
from harness.record import Run

FIRST, POWER, LARGEST = 1e-5, 1.5, 0.3
MIN_BEYOND = 3


def tolerance(step: int) -> float:
    """As a share of the reference's loss."""
    return float(min(LARGEST, FIRST * (step + 1) ** POWER))


class LossDiffersFromReference(Check):
    code = "OPT114"
    name = "loss-differs-from-reference"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        if run.reference is None:
            raise NotApplicable("no reference run: the script's header does not say how to make one")
        if run.reference.world_size == run.world_size:
            raise NotApplicable("the reference run has as many ranks: OPT115 compares it")
        mine = {p.step: p for p in losses.points(run)}
        other = {p.step: p for p in losses.points(run.reference)}
        common = sorted(set(mine) & set(other))
        if len(common) < MIN_BEYOND:
            raise Inconclusive(f"the two runs have {len(common)} steps in common")
        beyond = [s for s in common if not _close(mine[s].loss, other[s].loss, s)]
        run_of = _longest_run(common, set(beyond))
        if run_of < MIN_BEYOND:
            return
        first = beyond[0]
        worst = max(beyond, key=lambda s: _apart(mine[s].loss, other[s].loss))
        recording = run.present[0] if run.present else None
        yield self.finding(
            f"the loss leaves that of {run.reference.world_size} process at step {first}: {mine[first].loss:.6g} against "
            f"{other[first].loss:.6g}",
            where=losses.site(recording) if recording is not None else None,
            notes=[
                f"apart by {_apart(mine[first].loss, other[first].loss):.1e} of the loss at step {first}, tolerance {tolerance(first):.1e}",
                f"beyond it in {len(beyond)} of {len(common)} steps, most at step {worst} "
                f"({_apart(mine[worst].loss, other[worst].loss):.1e})",
            ],
            help="compare how gradients are averaged, how the loss is scaled and which samples each rank draws with the single process",
        )


def _longest_run(common: Sequence[int], beyond: set[int]) -> int:
    """How many steps in a row are beyond the tolerance."""
    longest = current = 0
    for step in common:
        current = current + 1 if step in beyond else 0
        longest = max(longest, current)
    return longest


def _apart(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1e-12) if math.isfinite(a) and math.isfinite(b) else math.inf


def _close(a: float, b: float, step: int) -> bool:
    if math.isnan(a) and math.isnan(b):
        return True
    return _apart(a, b) <= tolerance(step)
