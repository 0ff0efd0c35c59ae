"""EVL121 mean-of-batch-means: the accuracies of batches of unequal size are averaged with equal weight

What it does
    For evaluation loops whose source adds up `(prediction == label).mean()` of each batch and divides by the number of batches: looks at the sizes of
    the batches. A finding where the last one is at most a quarter of the others.

Why it is bad
    The few samples of the last batch weigh many times as much as the others. The accuracy depends on the batch size and, where each rank has a
    last batch, on the number of processes.

Wrong
    for x, y in loader:
        total += (model(x).argmax(1) == y).float().mean()
    accuracy = total / len(loader)

Right
    for x, y in loader:
        hits += (model(x).argmax(1) == y).sum(); num += len(y)
    accuracy = hits / num                               # of all ranks: all-reduce both

Known limits
    Accuracies of evaluations only: a running mean of the loss is an indication anyway. A last batch of more than a quarter changes little, and is silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity, Where
from harness.record import Run, where_of

SMALL, MAX_BATCHES = 4, 64


class MeanOfBatchMeans(Check):
    code = "EVL121"
    name = "mean-of-batch-means"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        told = {e.where: at for _, e in run.events("loop") if (at := where_of(e["batch_means"])) is not None}
        if not told and not passes.evaluating(run):
            raise NotApplicable("no evaluation pass was seen")
        uneven = [p for p in passes.evaluating(run) if p.where in told and p.exhausted and _sizes(p) is not None]
        if uneven:
            yield self._found(run, uneven, told)

    def _found(self, run: Run, uneven: list[Pass], told: dict[Where | None, Where]) -> Finding:
        one = uneven[0]
        first, last = _sizes(one) or (0, 0)
        return self.finding(
            f"the accuracies of {one.num_batches} batches are averaged with equal weight, the last of them has {last} samples and the others {first}",
            where=told[one.where],
            ranks=sorted({p.rank for p in uneven}),
            notes=[f"each sample of the last batch counts {first / last:.1f} times as much as another"],
            help="add up hits and samples, and divide once behind the loop (and behind the all-reduce)",
        )


def _sizes(one: Pass) -> tuple[int, int] | None:
    """(samples of the first batch, of the last), where the last one weighs far too much."""
    sizes = one.closed["batch_sizes"] if one.closed is not None else None
    if not isinstance(sizes, list) or len(sizes) != 3 or not 1 < one.num_batches <= MAX_BATCHES:
        return None
    first, _, last = sizes
    return (first, last) if isinstance(first, int) and isinstance(last, int) and 0 < SMALL * last <= first else None
