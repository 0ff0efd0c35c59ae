"""OPT110 clip-without-unscale: gradients are clipped while they still bear the scaler's factor

What it does
    Looks for clip_grad_norm_ between GradScaler.scale(...).backward() and GradScaler.unscale_. So too for a function of the script's own that writes
    gradients by a bound on their norm, where they come to less than a sixteenth between the backward and GradScaler.step, step after step.
    And for a hook on a parameter that cuts gradients to one and the same number, or norm, at every step, in a backward whose loss a GradScaler
    multiplied, where less than half of them is left.

Why it is bad
    The norm is the scale times too large: nearly every step is clipped to almost nothing, and how much depends on the scale.

Wrong
    scaler.scale(loss).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)

    p.register_hook(lambda grad: grad.clamp(-0.05, 0.05))      # runs during the backward

Right
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)

Known limits
    Needs an enabled GradScaler with a scale other than 1. A call without a limit (`max_norm=inf`, to log the norm) clips nothing, and is silent.
    Hooks are looked at in the first 8 steps. Where the factor stays the same, a hook is silent if it, or the source of the script, may multiply its
    limit by that factor: get_scale() is used for more than to show or compare it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import scaled_hooks
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of


class ClipWithoutUnscale(Check):
    code = "OPT110"
    name = "clip-without-unscale"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        clips = [(rank, e) for rank, e in run.events("clip")]
        by_hand = [(rank, e) for rank, e in run.events("scaled_clip")]
        if by_hand:
            yield self._by_hand(by_hand[0][1], [rank for rank, _ in by_hand])
            return
        hook = scaled_hooks.of(run)
        if hook is not None:
            yield self._by_hook(hook)
            return
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

    def _by_hand(self, event: Event, ranks: list[int]) -> Finding:
        wrote = where_of(event["wrote"])
        return self.finding(
            f"gradients are clipped by hand while they are still multiplied by the scaler's {event['scale']:g}: it takes nearly all of them away",
            where=event.where,
            ranks=replicas.rank_list(ranks),
            notes=[
                f"in {event['shrunk']} of {event['of']} steps less than a sixteenth of the gradient is left, and the scaler then divides that",
                *([f"line {wrote.line} writes them"] if wrote is not None else []),
            ],
            help="call scaler.unscale_(optimizer) before clipping",
        )

    def _by_hook(self, hook: scaled_hooks.Cutting) -> Finding:
        return self.finding(
            f"a hook clips gradients during the backward, while they are still multiplied by the scaler's {hook.scale:g}: its limit {hook.limit:.4g} is a "
            f"limit of {hook.limit / hook.scale:.3g} for what is unscaled",
            where=hook.where,
            ranks=replicas.rank_list(hook.ranks),
            notes=[f"in {hook.num} of {hook.of} steps less than half of the gradients that the hooks were given is left"],
            help="clip after the backward: scaler.unscale_(optimizer), then clip_grad_value_ or clip_grad_norm_; or multiply the limit by scaler.get_scale()",
        )
