"""EVL113 candidates-of-one-shard: in an evaluation each sample is compared with the samples of its own rank only.

What it does
    For evaluations in which every rank measures a share of its own: looks in the source, behind what is reduced afterwards, for a product of all
    samples of the rank with all samples of the rank (`queries @ gallery.T`), without a gather before it. So too, without a loader, for both sides of
    such a product cut out as the rank's share of all rows, `x[rank * n : (rank + 1) * n]`, and its best column compared with `arange(n)`.

Why it is bad
    Recall@k, the rank of the right answer, nearest neighbours are counted among 1/world_size of the candidates: the task is easier, and the
    number grows with the number of processes.

Wrong
    similar = torch.cat(queries) @ torch.cat(gallery).T
    hits = (similar.argmax(1) == torch.arange(len(similar))).sum(); dist.all_reduce(hits)

Right
    dist.all_gather(parts, torch.cat(gallery)); similar = torch.cat(queries) @ torch.cat(parts).T
    hits = (similar.argmax(1) == rank * len(similar) + torch.arange(len(similar))).sum(); dist.all_reduce(hits)

Known limits
    Needs both factors concatenated from lists that one loop, or one method, fills, or cut out in the function that reduces, in a size that hangs on
    the number of ranks: a protocol of folds has a size of its own. Products that sum over samples (`x.T @ x`) are healthy. A protocol with
    candidates of each share is possible, so it is a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import evaluations, reductions, reports
from harness.checks.evl.unequal_means import follows
from harness.model import Finding, Severity
from harness.record import Run, where_of


class CandidatesOfOneShard(Check):
    code = "EVL113"
    name = "candidates-of-one-shard"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        if (own := self._of_cut(run)) is not None:
            yield own
            return
        shares = [g for g in evaluations.aligned(run) if evaluations.sharded(g)]
        if not shares:
            raise NotApplicable("no evaluation in which each rank measures a share of its own")
        told = {e.where: found for _, e in run.events("reduced") if (found := where_of(e["pairs"])) is not None}
        for one in reductions.aligned(run) if told else ():
            group = next((g for g in shares if one.where in told and follows(one, g, run)), None)
            if group is None or not any(r.t_ns > one.at_t(rank) for rank, own in enumerate(reports.all_reports(run)) for r in own):
                continue
            total = sum(e.num_samples for e in group)
            yield self.finding(
                f"each of a rank's {group[0].num_samples} samples is compared with those of its own rank only, not with all {total}",
                where=told[one.where],
                ranks=run.rank_ids,
                notes=[f"line {one.where.line} then reduces the counts" if one.where is not None else "the counts are then reduced"],
                help="gather the candidates of all ranks first, and shift the right answers by what the ranks before have",
            )
            return

    def _of_cut(self, run: Run) -> Finding | None:
        """Counts that are summed up and reported, of a product of the rank's cut with itself."""
        told = {e.where: found for _, e in run.events("reduced") if (found := where_of(e["own_pairs"])) is not None}
        for one in reductions.aligned(run) if told else ():
            if one.where not in told or one.kind not in ("sum", "avg") or not all(math.isfinite(v) and v >= 0 for own in one.before for v in own):
                continue
            if not any(r.t_ns > one.at_t(rank) for rank, own in enumerate(reports.all_reports(run)) for r in own):
                continue
            return self.finding(
                f"each row of a rank's share is compared with those of this share only, 1/{run.world_size} of all: the right one is found more easily,"
                " and more so with more processes",
                where=told[one.where],
                ranks=run.rank_ids,
                notes=[f"line {one.where.line} then sums up the hits" if one.where is not None else "the hits are then summed up"],
                help="gather the candidates of all ranks (dist.all_gather) first, and shift the right answers by what the ranks before have",
            )
        return None

