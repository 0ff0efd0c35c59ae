"""OPT143 divided-while-accumulating: gradients are multiplied by one factor again and again while they are still being added up

What it does
    Compares, in the first steps, the gradients behind a backward with those before the next one of the same step, and with those that the step takes.
    A finding where one factor, the same each time, explains both, and the next backward's gradients were added.

Why it is bad
    What lies in `.grad` is the sum of all micro-batches so far. Dividing it by n after each of them divides the first by n^n and the last by n: the step
    follows the last micro-batch, and is far too small.

Wrong
    for x, y in micro_batches:
        loss(x, y).backward()
        for p in model.parameters(): p.grad /= len(micro_batches)
    optimizer.step()

Right
    for x, y in micro_batches:
        (loss(x, y) / len(micro_batches)).backward()
    optimizer.step()

Known limits
    A factor between two backwards only (weights of two tasks) is healthy, so are factors that differ, and an average over ranks in between. Sharded
    gradients (DTensor) are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Run

MIN_STEPS, CLOSE = 2, 1e-3


class DividedWhileAccumulating(Check):
    code = "OPT143"
    name = "divided-while-accumulating"
    severity = Severity.WARNING
    explains = ("OPT113", "OPT108")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(max(r.column("num_backward"), default=0) > 1 for r in run.present if r.num_rows):
            raise NotApplicable("no step takes the gradients of several backwards")
        found = {rank: told for rank, r in enumerate(run.ranks) if r is not None and len(told := _steps(r.of("rescaled"))) >= MIN_STEPS}
        if not found:
            return
        rank, told = next(iter(found.items()))
        event, factor = told[0]
        num = sum(isinstance(f, float) and abs(f - 1) > CLOSE for f in event["factors"] or ())
        yield self.finding(
            f"the gradients are multiplied by {factor:.4g} again and again while they are still being added up",
            where=event.where,
            ranks=replicas.rank_list(list(found)),
            notes=[
                f"{len(told)} of the first steps of rank {rank}; at step {event.step} the first micro-batch counts {factor**num:.3g} times as much as the "
                "last"
            ],
            help="divide each micro-batch's loss before its backward, or the gradients once, before the step",
        )


def _steps(events: Sequence[Event]) -> list[tuple[Event, float]]:
    return [(e, factor) for e in events if (factor := _factor(e)) is not None]


def _factor(event: Event) -> float | None:
    """The one that was applied each time; one between two backwards tells nothing unless the step's is the same."""
    told = event["factors"] if isinstance(event["factors"], list) else []
    factors = [f for f in told if isinstance(f, float)]
    applied = [f for f in factors if abs(f - 1) > CLOSE]
    if len(factors) != len(told) or not applied:
        return None
    if len(applied) == 1 and isinstance(event["last"], float):
        applied.append(event["last"])
    alike = len(applied) > 1 and max(applied) - min(applied) <= CLOSE * max(map(abs, applied))
    return applied[0] if alike else None
