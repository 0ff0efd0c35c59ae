"""DAT106 batch-sampler-not-sharded: a batch sampler of the script's own knows no rank.

What it does
    Compares the indices that a custom batch sampler draws on each rank in training.

Why it is bad
    `DataLoader(batch_sampler=...)` shards nothing by itself. All ranks train on the same batches: N processes do the work of one.

Wrong
    return iter(batches)

Right
    return iter(batches[rank::world_size])      # one list on all ranks, each takes its part

Known limits
    Ranks whose batches merely overlap are DAT114.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.dat.not_sharded import cut_afterwards, held_apart
from harness.model import Finding, Severity
from harness.record import Run


class BatchSamplerNotSharded(Check):
    code = "DAT106"
    name = "batch-sampler-not-sharded"
    severity = Severity.ERROR
    explains = ("DAT102", "DAT109", "DAT113", "DAT114")

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        groups = [g for g in passes.aligned(run, passes.training(run)) if all(p.opened["custom_batch_sampler"] for p in g)]
        groups = [g for g in groups if all(len(p.indices) > 3 for p in g)]
        if not groups:
            raise NotApplicable("no training pass over a batch sampler of the script's own on all ranks")
        same = [g for g in groups if passes.same_order(g)]
        if len(same) < len(groups) or cut_afterwards(run, same[0]) or held_apart(same):
            return
        first = same[0]
        num = min(len(p.indices) for p in first)
        yield self.finding(
            f"{first[0].opened['batch_sampler']} draws the same batches on all ranks: {num} of {num} indices are equal",
            where=first[0].made_sampler,
            ranks=run.rank_ids,
            notes=[f"{len(same)} of {len(groups)} training passes"],
            help="let the batch sampler yield every world_size-th batch from `rank` on",
        )
