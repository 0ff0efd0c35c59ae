"""SYN133 gathered-without-gradient: the loss compares with embeddings of all ranks through which no gradient flows

What it does
    Looks, in the first steps, for an all_gather of a tensor that has a graph, and for a product in the loss whose factor is what came
    back, without a gradient.

Why it is bad
    `dist.all_gather` cuts the graph. Of each pair only the side of the query is trained; the embeddings that it is compared with, the
    rank's own among them, are constants: half of the gradient of a contrastive loss is lost, without a word.

Wrong
    dist.all_gather(parts, z)
    logits = z @ torch.cat(parts).T

Right
    dist.all_gather(parts, z)
    parts[rank] = z                                   # with the mean over ranks that DDP takes, this is exact for a sum of both sides
    logits = z @ torch.cat(parts).T                   # or torch.distributed.nn.functional.all_gather(z)

Known limits
    A loss in which the rank's own embeddings also meet with their gradient takes the others as constant negatives: advice. What is
    gathered under no_grad, from a momentum encoder or for a metric is not judged; nor is what is scaled or cast after the gather.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class GatheredWithoutGradient(Check):
    code = "SYN133"
    name = "gathered-without-gradient"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process")
        found = [(rank, e) for rank, e in run.events("cut_gather")]
        if not found:
            raise NotApplicable("no loss was seen to compare with gathered constants")
        cut = [(rank, e) for rank, e in found if not e["own"]] or found
        event = cut[0][1]
        yield self.finding(
            f"{event['op']} cuts the graph: the loss compares with {event['numel']} gathered elements that carry no gradient"
            + (", this rank's own among them" if not event["own"] else ""),
            where=event.where,
            ranks=replicas.rank_list([rank for rank, _ in cut]),
            notes=[f"a factor of {str(event['product']).removesuffix('0').removesuffix('Backward')} in the loss's graph; the gathered tensor itself has a gradient"],
            help="put the own tensor back (`parts[rank] = z`), or use `torch.distributed.nn.functional.all_gather`",
            severity=Severity.ADVICE if event["own"] else None,
        )
