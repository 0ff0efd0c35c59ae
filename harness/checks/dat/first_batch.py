"""DAT115 first-batch-again: the loader starts anew at every step, and gives the very same batch.

What it does
    Looks at passes over a loader that were left after one batch of several, with an `iter(loader)` for every step: compares the indices
    (of a stream: the content) of that one batch.

Why it is bad
    A sampler that does not shuffle, or whose epoch stays where it is, begins every pass alike. Each rank trains on one batch for ever; the
    loss falls quickly, and nothing else of the data is ever seen.

Wrong
    for step in range(steps):
        x, y = next(iter(loader))

Right
    batches = iter(loader)                       # kept, and made anew (after set_epoch) when it is through
    for step in range(steps):
        x, y = next(batches)

Known limits
    Needs four steps. A loop over the loader that is left by `break`, a loader of one batch, and data whose samples are all equal are taken
    for meant. A loader that shuffles anew for each pass is healthy.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run

MIN_PASSES = 4


class FirstBatchAgain(Check):
    code = "DAT115"
    name = "first-batch-again"
    severity = Severity.ERROR
    explains = ("DAT101",)

    def end(self, run: Run) -> Iterable[Finding]:
        trained = passes.few(passes.training(run))
        if not trained:
            raise NotApplicable("no rank trains from a torch DataLoader")
        groups = [g for g in passes.by_key(trained) if _restarts(g)]
        found = [(g, num) for g in groups if (num := _again(g))]
        if found:
            group, num = found[0]
            yield self._found(group, num, sorted({g[0].rank for g, _ in found if g[0].key == group[0].key}))

    def _found(self, group: list[Pass], num: int, ranks: list[int]) -> Finding:
        first = group[0]
        wanted = first.shuffles or bool(first.opened["set_epoch"])
        of = f" of {first.planned}" if first.planned else ""
        return self.finding(
            f"the loader starts anew at every step and gives the same batch: {num} of {len(group)} steps on rank {first.rank} train on "
            "the batch of the step before",
            where=first.where,
            ranks=ranks,
            notes=[f"{first.num_samples} samples, the first batch{of}; sampler: {first.opened['sampler']}"],
            help="keep `iter(loader)` across steps; at StopIteration call `set_epoch` and make the next one (for one batch on purpose: draw it "
            "once, before the loop)",
            severity=self.severity if wanted else Severity.WARNING,
        )


def _restarts(group: list[Pass]) -> bool:
    """Passes that hand out one batch of several each, and are not left by a `break`."""
    one_batch = [p for p in group if p.num_batches == 1 and not p.exhausted]
    where = group[0].where
    in_loop = where is not None and where.text.lstrip().startswith(("for ", "async for "))
    return len(one_batch) >= MIN_PASSES and len(one_batch) >= 0.8 * len(group) and not in_loop


def _again(group: list[Pass]) -> int:
    """Passes whose batch is that of the pass before; 0 where these are few, or all samples look alike."""
    drawn = [p.rows if p.iterable else p.indices for p in group]
    if group[0].iterable and group[0].opened["batch_size"] is None:
        return 0  # a stream of batches: one that yields a fixed batch is meant
    if len(group[0].rows) > 1 and len(set(group[0].rows)) == 1:
        return 0
    num = sum(bool(a) and a == b for a, b in pairwise(drawn))
    return num if num >= MIN_PASSES - 1 and num >= 0.8 * (len(group) - 1) else 0
