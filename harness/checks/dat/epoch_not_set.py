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
    Needs two training passes of at least eight samples. A sampler that does not shuffle is healthy and silent; a sampler of the script's
    own counts as shuffling if it has a `set_epoch` method and draws another order than 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run

MIN_SAMPLES = 8  # two random orders agree on so many positions once in 40,320 times or less


class EpochNotSet(Check):
    code = "DAT101"
    name = "sampler-epoch-not-set"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        shuffling = [p for p in passes.few(passes.training(run)) if _shuffles(p)]
        if not shuffling:
            raise NotApplicable("no training pass over a shuffling sampler")
        groups = [g for g in passes.by_key([p for p in shuffling if len(p.indices) >= MIN_SAMPLES]) if len(g) > 1]
        if not groups:
            raise Inconclusive("needs two training passes over one loader")
        repeated = [g for g in groups if all(_same_order(g[0], p) for p in g[1:])]
        moving = {g[0].key for g in groups if g not in repeated}  # some rank does set the epoch: DAT103
        repeated = [g for g in repeated if g[0].key not in moving]
        if repeated:
            yield self._found(repeated)

    def _found(self, repeated: list[list[Pass]]) -> Finding:
        group = repeated[0]
        ranks = sorted({p.rank for g in repeated for p in g if g[0].key == group[0].key})
        num = min(len(p.indices) for p in group)
        last = len(group) - 1
        epochs = "epochs 0 and 1" if last == 1 else f"epochs 0 to {last}"
        sampler = (
            "a generator seeded anew"
            if group[0].distributed is None and not group[0].opened["set_epoch"]
            else "the sampler's epoch was never changed"
        )
        return self.finding(
            f"{epochs} drew the same sample order",
            where=group[0].where,
            ranks=ranks,
            notes=[f"{num} of {num} positions identical in {len(group)} passes on rank {ranks[0]}: {sampler}"],
            help="call `sampler.set_epoch(epoch)` before the loop over the loader",
        )


def _shuffles(one: Pass) -> bool:
    if one.shuffles:
        return True
    return bool(one.opened["set_epoch"]) and one.custom and one.distributed is None and list(one.indices) != sorted(one.indices)


def _same_order(first: Pass, other: Pass) -> bool:
    num = min(len(first.indices), len(other.indices))
    return num >= MIN_SAMPLES and first.indices[:num] == other.indices[:num] and len(set(first.indices[:num])) > 1
