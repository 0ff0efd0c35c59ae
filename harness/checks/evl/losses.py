"""Training losses of a pass, rank by rank: what a reported number is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.probe import protocol
from harness.record import Recording, Run


@dataclass(frozen=True)
class Epoch:
    """One training pass on all ranks, with the mean loss of each rank over its steps."""

    group: Sequence[Pass]
    means: tuple[float, ...]
    lasts: tuple[float, ...]
    num_steps: tuple[int, ...]

    @property
    def mean(self) -> float:
        return sum(self.means) / len(self.means)

    @property
    def total(self) -> float:
        return sum(self.means)


def epochs(run: Run) -> list[Epoch]:
    """Training passes that all ranks closed with steps and finite losses; thinned rows make none."""
    found = []
    for group in passes.aligned(run, passes.training(run)):
        per_rank = [_losses(run.ranks[p.rank], p) for p in group]
        if all(per_rank) and all(math.isfinite(v) for values in per_rank for v in values):
            found.append(
                Epoch(group, tuple(sum(v) / len(v) for v in per_rank), tuple(v[-1] for v in per_rank), tuple(len(v) for v in per_rank))
            )
    return found


def _losses(recording: Recording | None, one: Pass) -> list[float]:
    if recording is None or one.closed is None or one.steps <= 0:
        return []
    first = one.closed.step - one.steps
    offset, loss = protocol.NUMBER_OFFSET["loss"]
    rows = [recording.step_index[s] for s in range(first, one.closed.step) if s in recording.step_index]
    return [loss.unpack_from(recording.rows, i * protocol.ROW.size + offset)[0] for i in rows] if len(rows) == one.steps else []
