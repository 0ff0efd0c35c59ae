"""Series of one number over the steps of one rank, and how to tell growth from noise."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.record import Recording

MB = 1_000_000
BLOCKS = 8


@dataclass(frozen=True)
class Trend:
    """Growth of a series, by the medians of equal blocks."""

    growth: float  # last block's median minus the first's
    slope: float  # median of all pairwise slopes of the blocks (Theil-Sen), a step
    error: float  # half the width of the middle half of those slopes
    rising: int  # how many of the block-to-block changes go up
    num_blocks: int
    late: float  # growth over the second half, as a share of the whole

    @property
    def steady(self) -> bool:
        """It rises in nearly every block, and goes on rising at the end: no jump, no warm-up that levels off."""
        return self.rising >= self.num_blocks - 2 and self.late >= 0.3 and self.slope > 2 * self.error


def numbers(recording: Recording, name: str) -> tuple[list[int], list[int]]:
    """(step numbers, values) of one field of all rows."""
    return list(recording.column("step")), list(recording.column(name))


def trend(steps: Sequence[int], values: Sequence[float]) -> Trend | None:
    """None where there are too few values for blocks of three."""
    if len(values) < 3 * BLOCKS:
        return None
    size = len(values) / BLOCKS
    bounds = [(int(i * size), int((i + 1) * size)) for i in range(BLOCKS)]
    medians = [statistics.median(values[a:b]) for a, b in bounds]
    middles = [statistics.fmean(steps[a:b]) for a, b in bounds]
    slopes = sorted(
        (medians[j] - medians[i]) / (middles[j] - middles[i])
        for i in range(BLOCKS)
        for j in range(i + 1, BLOCKS)
        if middles[j] > middles[i]
    )
    if not slopes:
        return None
    quarter = len(slopes) // 4
    growth = medians[-1] - medians[0]
    half = medians[-1] - statistics.fmean(medians[BLOCKS // 2 - 1 : BLOCKS // 2 + 1])
    rising = sum(b > a for a, b in itertools.pairwise(medians))
    error = (slopes[-1 - quarter] - slopes[quarter]) / 2
    return Trend(growth, statistics.median(slopes), error, rising, BLOCKS, half / growth if growth > 0 else 0.0)
