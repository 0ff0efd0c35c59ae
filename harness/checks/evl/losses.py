"""Training losses of a pass, rank by rank: what a reported number is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.evl.reports import Value
from harness.probe import protocol
from harness.record import Recording, Run


@dataclass(frozen=True)
class Epoch:
    """One training pass on all ranks, with the mean loss of each rank over its steps, and over its samples."""

    group: Sequence[Pass]
    means: tuple[float, ...]
    lasts: tuple[float, ...]
    num_steps: tuple[int, ...]
    weighted: tuple[float, ...]
    num_samples: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.means) / len(self.means)

    @property
    def wholes(self) -> tuple[float, ...]:
        """What a mean over all ranks may be: of their means, over all steps, over all samples."""
        return self.mean, _mean(self.means, self.num_steps), _mean(self.weighted, self.num_samples)

    def tells(self, value: Value, rank: int) -> bool | None:
        """Whether a number is this rank's own mean; None where the mean over all ranks is written alike."""
        if value.digits < 3:
            return None
        own = (self.means[rank], self.weighted[rank])
        if all(value.is_far(v) for v in own):
            return False
        return True if any(value.is_near(v) for v in own) and not any(value.is_near(v) for v in self.wholes) else None

    @property
    def total(self) -> float:
        return sum(self.means)


def epochs(run: Run) -> list[Epoch]:
    """Training passes that all ranks closed with steps and finite losses; thinned rows make none."""
    found = []
    for group in passes.aligned(run, passes.training(run)):
        per_rank = [_losses(run.ranks[p.rank], p) for p in group]
        if all(per_rank) and all(math.isfinite(v) for steps in per_rank for v, _ in steps):
            found.append(_epoch(group, per_rank))
    return found


def _epoch(group: Sequence[Pass], per_rank: list[list[tuple[float, int]]]) -> Epoch:
    values = [[v for v, _ in steps] for steps in per_rank]
    means = tuple(sum(v) / len(v) for v in values)
    samples = tuple(sum(n for _, n in steps) for steps in per_rank)
    weighted = tuple(sum(v * n for v, n in steps) / num if num else mean for steps, num, mean in zip(per_rank, samples, means, strict=True))
    return Epoch(group, means, tuple(v[-1] for v in values), tuple(len(v) for v in values), weighted, samples)


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else sum(values) / len(values)


def _losses(recording: Recording | None, one: Pass) -> list[tuple[float, int]]:
    """Loss and samples of each step."""
    if recording is None or one.closed is None or one.steps <= 0:
        return []
    first, size = one.closed.step - one.steps, protocol.ROW.size
    (at, loss), (also_at, samples) = protocol.NUMBER_OFFSET["loss"], protocol.NUMBER_OFFSET["num_samples"]
    starts = [recording.step_index[s] * size for s in range(first, one.closed.step) if s in recording.step_index]
    if len(starts) != one.steps:
        return []
    return [(loss.unpack_from(recording.rows, s + at)[0], samples.unpack_from(recording.rows, s + also_at)[0]) for s in starts]
