"""SYN142 targets-without-offset: a contrastive loss over the candidates of all ranks takes rank 0's for the positive ones

What it does
    Looks, in the first steps, at losses over a matrix of [this rank's rows, all ranks' rows] which pick column i for row i on a rank above 0,
    though the block of this rank's own candidates begins at rank * rows: where its own tensor was found in what was gathered.

Why it is bad
    On rank 0 the targets are right. Every other rank is taught that its queries belong to rank 0's passages; with two ranks, half of the batch
    trains against the other half.

Wrong
    scores = q @ torch.cat(all_gather(p)).T
    loss = F.cross_entropy(scores, torch.arange(len(q)))                     # also: scores.diag()

Right
    loss = F.cross_entropy(scores, torch.arange(len(q)) + dist.get_rank() * len(q))

Known limits
    Candidates in another order, the rank's own first, are recognised by their values and are silent. Losses that take a diagonal out of a
    product without a graph, and gathers other than of torch.distributed, are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run, number


class TargetsWithoutOffset(Check):
    code = "SYN142"
    name = "targets-without-offset"
    severity = Severity.ERROR
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process")
        found = [(rank, e) for rank, e in run.events("own_targets") if rank]
        if not found:
            raise NotApplicable("no loss was seen to pick the wrong rank's candidates")
        rank, event = found[0]
        rows = number(event["rows"])
        yield self.finding(
            f"the targets lack the rank's offset: of {event['columns']} gathered candidates rank {rank} takes 0 to {rows - 1} for its own, "
            f"which lie at {rank * rows} to {rank * rows + rows - 1}",
            where=event.where,
            ranks=replicas.rank_list([r for r, _ in found]),
            notes=["rank 0's targets are right by chance: its offset is 0"],
            help="add `rank * rows` to the targets: `torch.arange(rows) + dist.get_rank() * rows`; of a diagonal, take the one that begins there",
        )
