"""OPT109 scaler-diverges: ranks scale their losses by different factors

What it does
    Compares the GradScaler's scale at each step.

Why it is bad
    The averaged gradient mixes scales: it is divided by a factor that fits none of the ranks.

Wrong
    scaler = GradScaler(init_scale=2.0 ** (10 + rank))

Right
    scaler = GradScaler()                 # the same on every rank; overflow is found after the all-reduce, alike

Known limits
    Needs a GradScaler.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity, Where
from harness.record import Run


class ScalerDiverges(Check):
    code = "OPT109"
    name = "scaler-diverges"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "OPT103", "SYN122")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        used = False
        for step in run.steps():
            scales = step.number("scale")
            used = used or any(scales)
            if step.complete and len(set(scales)) > 1:
                made = {e["scale"] for _, e in run.events("scaler_made")}
                early = _unscaled_before_sync(run) if len(made) == 1 and not facts.wrapped else None
                yield self.finding(
                    f"ranks scale the loss by different factors at step {step.index}: {', '.join(f'{s:g}' for s in scales)}",
                    where=early or replicas.first_where(run, "scaler_made" if len(made) > 1 else "scaler") or facts.grad_site(0),
                    ranks=replicas.majority_out(scales) or run.rank_ids,
                    notes=["the gradients are unscaled, and looked through for inf and nan, before they are averaged: one rank finds some, others do not"]
                    if early
                    else [],
                    help="average the gradients first, then `scaler.unscale_(optimizer)`: all ranks then find the same"
                    if early
                    else "construct GradScaler alike on every rank and update it after the gradients were averaged",
                )
                return
        if not used:
            raise NotApplicable("no GradScaler is used")


def _unscaled_before_sync(run: Run) -> Where | None:
    """The statement that unscales, where at most steps no collective had come since the last one, and one or more came before the next."""
    first = run.present[0]
    events = list({e.step: e for e in reversed(first.of("unscaled")) if e.step >= 1}.values())  # after a skipped step more come at the same one
    early = [
        e for e in events if not e["collectives"] and not e["reduced"] and (i := first.step_index.get(e.step)) is not None and first.row(i).num_coll
    ]  # fmt: skip
    return early[-1].where if len(early) >= 2 and 2 * len(early) > len(events) else None
