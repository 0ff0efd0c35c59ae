"""PRF107 poor-scaling: N ranks are hardly faster than one.

What it does
    Compares samples a second of all ranks with those of the reference run with fewer processes. An efficiency under 50 % is advice.

Why it is bad
    The machines are paid for and wait: for the network, for a straggler, for data, for cores.

Wrong
    a model of 10,000 parameters on 8 ranks

Right
    a larger batch a rank, gradients as bucket views, accumulation with no_sync, or fewer ranks

Known limits
    Needs a reference run of 20 steps and a core (or GPU) for each rank; with the same global batch small models scale badly by nature.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.prf import pace
from harness.model import Finding, Severity
from harness.record import Run

MIN_STEPS, MIN_EFFICIENCY = 20, 0.5


class PoorScaling(Check):
    code = "PRF107"
    name = "poor-scaling"
    severity = Severity.ADVICE

    def end(self, run: Run) -> Iterable[Finding]:
        reference = run.reference
        if reference is None:
            raise NotApplicable("no reference run")
        if reference.world_size >= run.world_size:
            raise NotApplicable("the reference run has as many ranks")
        many, one = samples_per_s(run), samples_per_s(reference)
        if not many or not one:
            raise Inconclusive(f"needs {MIN_STEPS} steps in both runs")
        pace.require_cores(run)
        efficiency = many / one / (run.world_size / reference.world_size)
        if efficiency < MIN_EFFICIENCY:
            yield self.finding(
                f"{run.world_size} ranks give {many / one:.2f} times the samples a second of {reference.world_size}",
                notes=[f"{many:.0f} against {one:.0f} samples/s, efficiency {efficiency:.0%}"],
                help="look at the shares of data, collectives and backward in the report; a larger batch a rank scales better",
            )


def samples_per_s(run: Run) -> float:
    """Of all ranks together, in the median step; 0 where there are too few steps."""
    total = 0.0
    for recording in run.present:
        wall, samples = pace.column(recording, "wall_s"), pace.column(recording, "num_samples")
        if len(wall) < MIN_STEPS:
            return 0.0
        total += pace.median(samples) / max(pace.median(wall), 1e-9)
    return total
