"""OPT110 clip-without-unscale: gradients are clipped while they still bear the scaler's factor

What it does
    Looks for clip_grad_norm_ between GradScaler.scale(...).backward() and GradScaler.unscale_.

Why it is bad
    The norm is the scale times too large: nearly every step is clipped to almost nothing, and how much depends on the scale.

Wrong
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)

Right
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)

Known limits
    Needs an enabled GradScaler with a scale other than 1. A call without a limit (`max_norm=inf`, to log the norm) clips nothing, and is silent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class ClipWithoutUnscale(Check):
    code = "OPT110"
    name = "clip-without-unscale"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        clips = [(rank, e) for rank, e in run.events("clip")]
        if not clips:
            raise NotApplicable("no gradient clipping")
        scaled = [(rank, e) for rank, e in clips if e["scaled"] and e["max_norm"] != math.inf]
        if not scaled:
            return
        yield self.finding(
            f"gradients are clipped while they are still multiplied by the scaler's {scaled[0][1]['scale']:g}",
            where=scaled[0][1].where,
            ranks=replicas.rank_list([r for r, _ in scaled]),
            notes=[f"{len(scaled)} of {len(clips)} calls; norm {scaled[0][1]['norm']:.4g} against a limit of {scaled[0][1]['max_norm']}"],
            help="call scaler.unscale_(optimizer) before clipping",
        )
