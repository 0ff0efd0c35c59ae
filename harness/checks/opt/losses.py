"""The loss of each step over all ranks, as the rows have it."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from harness.model import Where
from harness.probe import protocol
from harness.record import Recording, Run
from harness.steps import Step


@dataclass(frozen=True)
class Point:
    """One optimizer step: the mean over the ranks of what backward() was called on, weighted by samples."""

    step: int
    opt: int
    loss: float
    num_ranks: int


def of_step(step: Step) -> Point | None:
    """None where no backward ran before this step. Of several backwards (accumulation) the last counts."""
    num_backward, loss, samples = step.number("num_backward"), step.number("loss"), step.number("num_samples")
    kinds = set(num_backward)
    if kinds == {0}:
        return None
    if kinds == {1} and min(samples) > 0:  # nearly always
        weight = sum(samples)
        total = sum(map(operator.mul, loss, samples))
        if math.isfinite(total):
            return Point(step.index, step.number("opt")[-1], total / weight, len(loss))
    weights = [max(1, n) if b else 0 for n, b in zip(samples, num_backward, strict=True)]
    if not all_finite(loss):
        weights = [0 if math.isnan(v) and not f & protocol.FLAG_LOSS_NOT_FINITE else w for v, f, w in zip(loss, step.number("flags"), weights, strict=True)]
        if not any(weights):
            return None  # stages of a pipeline without the loss, or it has not arrived from the device
    total = sum(v * w for v, w in zip(loss, weights, strict=True) if w)
    opt = next(o for o, w in zip(reversed(step.number("opt")), reversed(weights), strict=True) if w)
    return Point(step.index, opt, total / sum(weights), sum(map(bool, weights)))


def all_finite(values: Sequence[float]) -> bool:
    """Whether there is no nan and no infinity among them; their sum tells, unless it overflows."""
    return math.isfinite(sum(values)) or all(math.isfinite(v) for v in values)


def points(run: Run) -> list[Point]:
    """Of all steps; computed once for all checks of one judgement."""
    found = run.__dict__.get("_loss_points")
    if found is None:
        found = run.__dict__["_loss_points"] = [p for step in run.steps() if (p := of_step(step)) is not None]
    return list(found)


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
