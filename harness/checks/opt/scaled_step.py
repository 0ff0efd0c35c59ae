"""OPT125 scaled-gradients-stepped: the optimizer steps on gradients that still bear the scaler's factor

What it does
    Looks for steps whose gradients come from a `scaler.scale(loss).backward()`, and which neither `scaler.step` nor `scaler.unscale_` has
    seen. The gradients' own values must confirm it: they are as the backward left them, not smaller by the factor.

Why it is bad
    The step is the scale times too large, or, with Adam, hidden by its normalisation: then gradients that overflowed are stepped on
    without the check that would skip them, clipping and weight decay are out of proportion, and the scale never adapts.

Wrong
    scaler.scale(loss).backward()
    optimizer.step()

Right
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()

Known limits
    Judged on the first six steps, of torch's own optimizers. A factor put on the loss without a GradScaler is not known. Clipping the
    scaled gradients is OPT110's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run

MIN_STEPS = 2


class ScaledStep(Check):
    code = "OPT125"
    name = "scaled-gradients-stepped"
    severity = Severity.ERROR
    explains = ("OPT112", "OPT113")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(e["enabled"] for p in run.processes for e in p.of("scaler_made")):
            raise NotApplicable("no GradScaler is used")
        hits = [(process, found) for process in run.processes for found in _stepped(process)]
        if not hits:
            return
        first = hits[0][1][0]
        yield self.finding(
            f"the optimizer steps on gradients that are still multiplied by the scaler's {first['scale']:g}",
            where=first.where,
            ranks=replicas.rank_list([max(p.rank, p.env_rank, 0) for p, _ in hits]),
            notes=[f"{len(hits[0][1])} steps of {first['kind']} without scaler.step or scaler.unscale_; their gradients are as backward() left them"],
            help="call `scaler.step(optimizer)` and `scaler.update()` in place of `optimizer.step()`",
        )


def _stepped(process: Recording) -> list[list[Event]]:
    """Steps on scaled gradients, by optimizer; only where all steps whose values are known confirm it."""
    values = {(e["opt"], e.step): e for e in process.of("gradients")}
    by_opt: dict[object, list[tuple[Event, bool]]] = {}
    for event in process.of("scaled_step"):
        kept = _as_left(values.get((event["opt"], event.step)), event["scale"])
        if kept is not None and event["own"]:
            by_opt.setdefault(event["opt"], []).append((event, kept))
    return [[e for e, _ in found] for found in by_opt.values() if len(found) >= MIN_STEPS and all(kept for _, kept in found)]


def _as_left(gradients: Event | None, scale: float) -> bool | None:
    """Whether the step got what the backward had left, up to an average over ranks; None where that is not known."""
    if gradients is None or not gradients["local"] or not gradients["at_step"]:
        return None
    local, at_step = dict(gradients["local"]), dict(gradients["at_step"])
    before, after = (math.sqrt(sum(v * v for values in found.values() for v in values)) for found in (local, at_step))
    if not (math.isfinite(before) and math.isfinite(after)) or not before or not after:
        return None
    return local == at_step or (scale >= 64 and after > before * scale**-0.5)
