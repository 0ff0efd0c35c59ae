"""DAT101 sampler-epoch-not-set: every epoch draws the samples in the same order.

What it does
    Compares the order of the sample indices of successive training passes over a loader with a shuffling sampler.

Why it is bad
    `DistributedSampler` shuffles with seed + epoch. Without `set_epoch` the epoch stays 0: each rank sees the same samples in the same
    batches for ever, and never those of the other ranks. The loss still falls, a little slower and to a worse place.

Wrong
    for epoch in range(epochs):
        for x, y in loader: ...

Right
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader: ...

Known limits
    Needs two complete training passes. A sampler that does not shuffle is healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes
from harness.model import Finding, Severity
from harness.record import Run


class EpochNotSet(Check):
    code = "DAT101"
    name = "sampler-epoch-not-set"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        shuffling = [p for p in passes.training(run) if p.shuffles]
        if not shuffling:
            raise NotApplicable("no training pass over a shuffling sampler")
        groups = passes.by_loader([p for p in shuffling if p.complete and p.num_samples > 1])
        repeated = [g for g in groups if len(g) > 1]
        if not repeated:
            raise Inconclusive("needs two complete training passes over one loader")
        for group in repeated:
            same = [p for p in group[1:] if p.order == group[0].order]
            if len(same) == len(group) - 1:
                ranks = sorted({p.rank for p in group})
                yield self.finding(
                    f"epochs 0 to {len(group) - 1} drew the same sample order",
                    where=group[0].where,
                    ranks=ranks,
                    notes=[f"{group[0].num_samples} of {group[0].num_samples} positions identical in {len(group)} passes on rank {ranks[0]}"],
                    help="call `sampler.set_epoch(epoch)` before the loop over the loader",
                )
                return
