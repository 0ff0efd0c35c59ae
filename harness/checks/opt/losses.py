"""The loss of each step over all ranks, as the rows have it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.model import Where
from harness.probe import protocol
from harness.record import Recording, Run, Step

_STEP = protocol.NUMBER_OFFSET


@dataclass(frozen=True)
class Point:
    """One optimizer step: the mean over the ranks of what backward() was called on, weighted by samples."""

    step: int
    opt: int
    loss: float
    num_ranks: int


def of_step(step: Step) -> Point | None:
    """None where no backward ran before this step. Of several backwards (accumulation) their sum counts."""
    total = weight = 0.0
    num, opt = 0, 65_535
    for raw in step.raw:
        if raw is None:
            continue
        values = {
            name: _STEP[name][1].unpack_from(raw, _STEP[name][0])[0] for name in ("opt", "loss", "loss_sum", "num_backward", "num_samples")
        }
        if not values["num_backward"]:
            continue
        opt = values["opt"]
        loss = values["loss_sum"] if values["num_backward"] > 1 and values["loss_sum"] else values["loss"]
        samples = max(1, values["num_samples"])
        total, weight, num = total + loss * samples, weight + samples, num + 1
    return Point(step.index, opt, total / weight, num) if num else None


def points(run: Run) -> list[Point]:
    return [p for step in run.steps() if (p := of_step(step)) is not None]


def site(recording: Recording, step: int | None = None) -> Where | None:
    """The backward of a step, else the first one seen."""
    if step is not None:
        for event in recording.of("accumulation"):
            if event.step == step and event.where is not None:
                return event.where
    losses = recording.of("loss")
    return losses[0].where if losses else None


def finite(found: list[Point]) -> list[Point]:
    return [p for p in found if math.isfinite(p.loss)]
