"""OPT119 gradients-cleared-before-step: gradients are zeroed between the backward and the step

What it does
    Looks for steps whose gradients are None or zero although the backward before them gave some; and for micro-batches of an accumulation
    window whose gradients are cleared before the next one's backward, so that only the last of the window reaches the step.

Why it is bad
    The step has nothing to apply: the model never changes, without a word. Or it applies one micro-batch of several, divided by all of them.

Wrong
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()

Right
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

Known limits
    Judged on the first six steps, micro-batches on the first 16. Gradients that are cleared between backwards of different statements (a
    GAN, probes of a gradient's norm), between which an optimizer steps or the weights move (SAM), or that the script puts together itself
    before the step (PCGrad, per-sample clipping) are silent. Where neither `no_sync()` nor a factor at the loss says that the window is an
    accumulation, it is advice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, where_of

MIN_WINDOWS, NUM_WINDOWS = 3, 16


class ClearedBeforeStep(Check):
    code = "OPT119"
    name = "gradients-cleared-before-step"
    severity = Severity.ERROR
    explains = ("OPT113", "OPT101")

    def end(self, run: Run) -> Iterable[Finding]:
        found = self._thrown_away(run)
        if found is not None:
            yield found
            return
        seen = [(rank, e) for rank, e in run.events("gradients") if e["local"]]
        if not seen:
            raise NotApplicable("no gradients were seen between a backward and a step")
        lost = [
            (r, e) for r, e in seen if any(any(v) for v in e["local"].values()) and not any(any(v) for v in (e["at_step"] or {}).values())
        ]
        if len(lost) == len(seen) and len(lost) >= 2:
            rank, first = lost[0]
            event = optimizers.params_event(run, rank, first["opt"])
            yield self.finding(
                f"every gradient is gone at the step: it was zeroed after the backward, in {len(lost)} of {len(seen)} steps seen",
                where=optimizers.step_site(run, rank, first["opt"]) or (event.where if event else None),
                ranks=replicas.rank_list([r for r, _ in lost]),
                help="zero the gradients before the backward, not between backward and step",
            )

    def _thrown_away(self, run: Run) -> Finding | None:
        """Most steps saw only the last of several backwards of one statement."""
        for recording in run.present:
            windows = [e for e in recording.of("accumulation") if e.step < NUM_WINDOWS]
            hit = [e for e in windows if _dropped_of(e)]
            if len(hit) < MIN_WINDOWS or len(hit) < 0.8 * len(windows) or not _last_one_steps(recording):
                continue
            site, num, no_sync, cleared = _dropped_of(hit[0]) or ({}, 0, 0, {})
            scaled = any(e["scaled"] for e in recording.of("loss") if e.where == where_of(site))
            meant = no_sync or scaled
            return self.finding(
                f"{num} of {num + 1} backwards a step are thrown away: their gradients are zeroed before any step",
                where=where_of(cleared) if where_of(cleared) is not None and cleared.get("file") else where_of(site),
                ranks=replicas.rank_list([r for r, e in run.events("accumulation") if _dropped_of(e)]),
                notes=[
                    f"{len(hit)} of {len(windows)} steps looked at",
                    *(["inside no_sync()"] if no_sync else ["the loss is scaled"] * scaled),
                ],
                help="zero the gradients once a window, after the step, not before every micro-batch",
                severity=self.severity if meant else Severity.ADVICE,
            )
        return None


def _dropped_of(event: Event) -> tuple[Any, int, int, Any] | None:
    """(site, number, inside no_sync, site of the clearing) of backwards from the statement that also gave the step its gradients."""
    for entry in event["dropped"] if isinstance(event["dropped"], list) else ():
        if (
            isinstance(entry, list)
            and len(entry) == 4
            and all(isinstance(n, int) for n in entry[1:3])
            and where_of(entry[0]) == event.where
        ):
            return entry[0], entry[1], entry[2], entry[3] if isinstance(entry[3], dict) else {}
    return None


def _last_one_steps(recording: Recording) -> bool:
    """The step's gradients are those of the last backward, up to a factor: the script does not put others together from all of them."""
    told = [e for e in recording.of("gradients") if e["local"]]
    return bool(told) and all(_same_direction(e["local"], e["at_step"] or {}) for e in told)


def _same_direction(a: Any, b: Any) -> bool:
    left = [v for key in a for v in a[key]]
    right = [v for key in a for v in b.get(key, ())]
    if len(left) != len(right):
        return False
    norms = math.hypot(*left) * math.hypot(*right)
    return norms > 0 and sum(x * y for x, y in zip(left, right, strict=True)) > 0.999 * norms
