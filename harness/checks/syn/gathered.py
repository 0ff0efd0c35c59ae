"""SYN133 gathered-without-gradient: the loss compares with embeddings of all ranks through which no gradient flows, or the own part of it alone

What it does
    Looks, in the first steps, for an all_gather of a tensor that has a graph, and for a product in the loss whose factor is what came
    back, without a gradient. And for a gather with a backward of the script's own that gives back the rank's own part of the gradient, where every rank
    computes the same loss of all ranks' rows and DDP takes the mean.

Why it is bad
    `dist.all_gather` cuts the graph. Of each pair only the side of the query is trained; the embeddings that it is compared with, the
    rank's own among them, are constants: half of the gradient of a contrastive loss is lost, without a word. Where each rank hands on its own part of
    one loss, their sum is the gradient; the mean is one of as many parts of it as there are ranks, and SGD steps by that.

Wrong
    dist.all_gather(parts, z)
    logits = z @ torch.cat(parts).T

Right
    dist.all_gather(parts, z)
    parts[rank] = z                                   # with the mean over ranks that DDP takes, this is exact for a sum of both sides
    logits = z @ torch.cat(parts).T                   # or torch.distributed.nn.functional.all_gather(z)

Known limits
    A loss in which the rank's own embeddings also meet with their gradient takes the others as constant negatives: advice. What is
    gathered under no_grad, from a momentum encoder or for a metric is not judged; nor is what is scaled or cast after the gather. An own part is a
    warning for SGD, advice for optimizers that divide a gradient's size out, and not told where ranks' losses differ, where a communication hook or a
    write to the gradients may make up for it, or where the source multiplies anything by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import own_slices, replicas
from harness.model import Finding, Severity
from harness.record import Event, Run


class GatheredWithoutGradient(Check):
    code = "SYN133"
    name = "gathered-without-gradient"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process")
        found = [(rank, e) for rank, e in run.events("cut_gather")]
        if not found and (part := own_slices.found(run)) is not None:
            yield self._own_part(run, part)
            return
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

    def _own_part(self, run: Run, part: Event) -> Finding:
        size, felt = run.world_size, own_slices.feels_a_factor(run)
        return self.finding(
            f"the backward of {part['function']} hands on the rank's own part of the gradient: every rank computes the same loss of all ranks' rows, and the "
            f"mean that DDP takes over {size} ranks is 1/{size} of its gradient",
            where=part.where,
            ranks=run.rank_ids,
            notes=[] if felt else ["an optimizer that divides the gradient's size out, as Adam does, steps as if nothing were missing"],
            help="all-reduce the gradient in that backward before the own part is cut out, or multiply the loss by the number of ranks; "
            "`torch.distributed.nn.functional.all_gather` does the first",
            severity=None if felt else Severity.ADVICE,
        )
