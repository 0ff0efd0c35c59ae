"""DAT114 shards-do-not-cover: shares cut by the script overlap, and miss samples.

What it does
    Puts together what all ranks draw in one pass under a sampler, batch sampler or Subset of the script's own: each index should come
    once. For data sets that each rank cut by itself, compares the content of the ranks' shares.

Why it is bad
    Samples in the overlap weigh double, those that no rank draws are never learned.

Wrong
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + rank))
    mine = order[rank::world_size]               # a part of another list on each rank

Right
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    mine = order[rank::world_size]

Known limits
    Needs complete passes. Sampling with replacement overlaps by design. Padding of up to one batch a rank is healthy. Shares whose
    content is random, or that are drawn anew in each pass, are not judged by content.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.dat.not_sharded import cut_afterwards
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run, number


class ShardsDoNotCover(Check):
    code = "DAT114"
    name = "shards-do-not-cover"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        groups = [
            g
            for g in passes.aligned(run, passes.training(run))[:64]
            if all(p.exhausted and p.distributed is None and not p.opened["replacement"] for p in g)
        ]
        if not groups:
            raise NotApplicable("no complete training pass over shares that the script cut itself")
        groups = [g for g in groups if g[0].key == groups[0][0].key]
        if cut_afterwards(run, groups[0]):
            return
        found = [self._by_index(g) for g in groups]
        if found and all(found):
            yield next(f for f in found if f is not None)
            return
        if not any(_indices(p)[1] for p in groups[0]) and not passes.resampled(run, groups[0][0]):
            alike = self._by_content(groups)
            if alike:
                yield alike

    def _by_index(self, group: list[Pass]) -> Finding | None:
        drawn = [_indices(p) for p in group]
        total = max(n for _, n in drawn)
        if total < 8 or any(n != total or len(set(i)) < len(i) for i, n in drawn):
            return None
        num, union = sum(len(i) for i, _ in drawn), set().union(*(i for i, _ in drawn))
        twice, allowed = num - len(union), sum(number(p.opened["batch_size"], 1) for p in group) + 0.02 * total
        largest = max(len(i) for i, _ in drawn)
        if twice <= allowed or twice >= 0.98 * (num - largest) or not 0.7 * total <= num <= 1.3 * total:
            return None
        return self.finding(
            f"the shares overlap: of {num} samples drawn {len(union)} are different ones; {total - len(union)} of {total} come never",
            where=group[0].made_sampler if group[0].custom else group[0].made_dataset,
            ranks=[p.rank for p in group],
            notes=[f"samples by rank: {', '.join(str(len(i)) for i, _ in drawn[:8])}; {twice} come more than once"],
            help="build one list with one seed on all ranks, and take every world_size-th element from `rank` on",
        )

    def _by_content(self, groups: list[list[Pass]]) -> Finding | None:
        """The same samples in the shares of two ranks, pass after pass, though no rank holds one of them twice."""
        common: set[int] = set()
        for nth, group in enumerate(groups):
            group = group[: passes.MAX_COMPARED]
            rows = [set(p.rows) for p in group]
            if any(len(r) < 8 or len(r) < len(p.rows) for r, p in zip(rows, group, strict=True)) or len({p.rows for p in group}) == 1:
                return None
            shared = {row for i, r in enumerate(rows) for s in rows[i + 1 :] for row in r & s}
            common = shared if nth == 0 else common & shared
            if len(common) < max(2, 0.1 * min(len(r) for r in rows)) or len(common) >= 0.95 * min(len(r) for r in rows):
                return None
        return self.finding(
            f"the shares that the ranks cut for themselves overlap: {len(common)} samples are in more than one of them",
            where=groups[0][0].made_dataset,
            ranks=[p.rank for p in groups[0]],
            notes=[f"samples by rank: {', '.join(str(p.num_samples) for p in groups[0][:8])}"],
            help="cut with `data[rank::world_size]`, or with bounds that end where the next rank's begin",
            severity=Severity.WARNING,
        )


def _indices(one: Pass) -> tuple[tuple[int, ...], int]:
    """(indices drawn, size of the data they index); size 0 where the rank's data set is its own share."""
    if one.subset is not None:
        base = passes.unpack(one.subset.get("indices"))
        if len(base) == number(one.subset.get("num")) and all(i < len(base) for i in one.indices):
            return tuple(base[i] for i in one.indices), number(one.subset.get("of"))
        return (), 0
    return (one.indices, max(0, one.dataset_len)) if one.custom else ((), 0)
