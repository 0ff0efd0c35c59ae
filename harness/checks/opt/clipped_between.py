"""OPT131 clipped-while-accumulating: gradients are clipped after every micro-batch, before all of them have been added up

What it does
    Looks, in the first 64 steps, for two calls of clip_grad_norm_ at one statement before one step, with a backward between them whose gradients are
    added to those that the first call had clipped.

Why it is bad
    The first micro-batch's gradient is cut to the limit, the second added and the sum cut again: the last ones weigh most, and the limit holds for
    parts of the batch. Inside DDP's `no_sync()` each rank also clips by the norm of its own gradients.

Wrong
    for i, batch in enumerate(loader):
        (loss(batch) / accumulation).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        if (i + 1) % accumulation == 0: optimizer.step(); optimizer.zero_grad()

Right
        if (i + 1) % accumulation == 0:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(); optimizer.zero_grad()

Known limits
    Silent where gradients are zero again between the calls (clipping by sample), where no norm was above its limit, and with several optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number

MIN_STEPS = 2


class ClippedWhileAccumulating(Check):
    code = "OPT131"
    name = "clipped-while-accumulating"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        accumulates = any(max(r.column("num_backward"), default=0) > 1 for r in run.present if r.num_rows)
        if not accumulates and not any(True for _ in run.events("clip")):
            raise NotApplicable("no gradient clipping, no gradient accumulation")
        found = {rank: pairs for rank, r in enumerate(run.ranks) if r is not None and len(pairs := _between(r)) >= MIN_STEPS}
        if not found:
            return
        rank, pairs = next(iter(found.items()))
        first = pairs[0]
        local = any(e["no_sync"] for e in pairs)
        yield self.finding(
            "gradients are clipped while they are still being accumulated, after every micro-batch"
            + (", and inside no_sync() by each rank's own norm" if local else ""),
            where=first.where,
            ranks=replicas.rank_list(list(found)),
            notes=[
                f"{len(pairs)} steps of rank {rank}; at step {first.step} a norm of {first['norm']:.4g} was cut to {first['max_norm']:g} "
                "before the next backward"
            ],
            help="clip once, after the last micro-batch of a step: where the optimizer steps",
        )


def _between(recording: Recording) -> list[Event]:
    """One call a step: it clipped gradients, and the next call of the same statement before the same step found more added to them."""
    if len(set(recording.column("opt"))) != 1:
        return []
    by_place: dict[tuple[object, int], list[Event]] = {}
    for e in recording.of("clip"):
        by_place.setdefault((e.where, e.step), []).append(e)
    found = []
    for calls in by_place.values():
        cut = next((a for a, b in pairwise(calls) if 0 < number(a["accumulated"]) < number(b["accumulated"]) and _is_clipped(a)), None)
        if cut is not None:
            found.append(cut)
    return found


def _is_clipped(event: Event) -> bool:
    norm, limit = event["norm"], event["max_norm"]
    return isinstance(norm, float) and isinstance(limit, (int, float)) and math.isfinite(limit) and norm > limit
