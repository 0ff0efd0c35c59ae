"""OPT132 divided-by-all-and-averaged: the loss is divided by a count of all ranks, and the gradients are averaged over the ranks as well

What it does
    Compares the numbers that each loss is divided by, read from its graph before the backward, with the whole numbers that the ranks summed
    up by all_reduce before it. Where they are equal at every step on every rank, and the gradients are averaged, the mean is taken twice.
    So it is where the loss itself, or the one tensor that it is made of, is summed up in place and divided by the number of ranks: autograd
    knows of the division and not of the sum. And where the source divides the whole of a mean loss by the number of ranks, or a sum over the
    batch by what it divides by the number of ranks to make the loader's batch size, and the graph has that very quotient.

Why it is bad
    The gradient is that of the global mean, divided by the world size once more: a learning rate tuned on one process is wrong on N, and
    clipping and weight decay are out of proportion.

Wrong
    dist.all_reduce(num_boxes)
    loss = box_error.sum() / num_boxes            # DDP averages the gradients

    dist.all_reduce(loss); loss /= world_size     # for the log, and then:
    loss.backward()

    loss = criterion(model(x), y) / dist.get_world_size()

Right
    dist.all_reduce(num_boxes)
    loss = box_error.sum() * dist.get_world_size() / num_boxes

    shown = loss.detach().clone(); dist.all_reduce(shown); shown /= world_size
    loss.backward()                               # or torch.distributed.nn.functional.all_reduce, where the gradient is to cross the ranks

Known limits
    Judged on the first 16 steps. Silent where a factor of the number of ranks stands near the quotient, where the source divides by the number of
    ranks before the sum, hooks gradients (without DDP: elsewhere than on parameters) or multiplies the learning rate by it, and where gradients are
    rescaled before the step. A count that never
    varies must be the very tensor that was reduced: a Python number of the same value may be another count. A loss of which only a part was
    reduced is not judged, nor one that another factor of the number of ranks stands over, nor a sum of terms (one for what came from each rank).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import shares, unseen_sums, whole_divisors
from harness.checks.syn import gradients, replicas
from harness.model import Finding, Severity
from harness.record import Run


class AveragedAgain(Check):
    code = "OPT132"
    name = "divided-by-all-and-averaged"
    severity = Severity.WARNING
    explains = ("EVL107",)  # a mean of such losses is too small by the same number

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        found = [s for s in shares.of(run) if s.certain]
        unseen, whole = unseen_sums.of(run), whole_divisors.of(run)
        if not any(any(r.column("num_backward")) for r in run.present):
            raise NotApplicable("no backward was seen before a step")
        if not (found or unseen or whole) or not _averaged(run, facts):
            return
        if unseen is not None:
            yield self._of_unseen(run, unseen)
            return
        if not found and whole is not None:
            yield from self._of_whole(run, whole)
            return
        first = found[0]
        shown = ", ".join(f"{v:g}" for v in first.counts[:4])
        yield self.finding(
            f"the loss is divided by the count of all ranks ({shown}, ...), and the gradients are averaged over the {run.world_size} ranks again:"
            f" they are 1/{run.world_size} of the global batch's",
            where=first.counted or first.made or first.where,
            ranks=run.rank_ids,
            notes=[
                f"at {len(first.counts)} of {len(first.counts)} backwards the loss is divided by what this all_reduce made",
                *([f"the loss is made at line {first.made.line}"] if first.made else []),
            ],
            help="divide the count by `dist.get_world_size()` after the all_reduce, or multiply the loss by it",
        )

    def _of_unseen(self, run: Run, unseen: unseen_sums.UnseenSum) -> Finding:
        return self.finding(
            f"the loss is summed over the ranks in place and divided by {run.world_size}: autograd sees the division alone, and the gradients are"
            f" averaged over the {run.world_size} ranks again: they are 1/{run.world_size} of what they should be",
            where=unseen.where,
            ranks=run.rank_ids,
            notes=[f"at {unseen.num} of {unseen.num} backwards", *([f"the loss is made at line {unseen.made.line}"] if unseen.made else [])],
            help="reduce a `loss.detach().clone()` for the log; where the gradient is to cross the ranks, torch.distributed.nn.functional.all_reduce",
        )

    def _of_whole(self, run: Run, whole: whole_divisors.WholeDivisor) -> Iterable[Finding]:
        by = "the number of ranks" if whole.kind == "ranks" else f"the batch of all ranks ({whole.value:g})"
        who = "DDP averages the gradients" if run.present[0].of("wrap") else "the gradients are averaged"
        yield self.finding(
            f"the loss is divided by {by}, and {who} over the {run.world_size} ranks again: they are 1/{run.world_size} of the"
            " global batch's",
            where=whole.where,
            ranks=run.rank_ids,
            notes=[f"at {whole.num} of {whole.num} backwards that were looked at", *([f"backward at line {whole.backward.line}"] if whole.backward else [])],
            help="leave the division out: a mean over the rank's own batch is what is averaged"
            if whole.kind == "ranks"
            else "divide by the rank's own batch: the gradients are averaged over the ranks",
        )


def _averaged(run: Run, facts: replicas.Replicas) -> bool:
    """By DDP itself, with nothing in between, or by hand to the mean of what the backwards left."""
    if gradients.ratios(run):
        return gradients.averaged(run)
    hooked = any(True for kind in ("comm_hook", "leaf_hook") for _ in run.events(kind))
    return facts.wrapped and facts.num_reduce > 0 and not hooked and not gradients.rescaled(run) and not _enlarged(run)


def _enlarged(run: Run) -> bool:
    """Some gradient is larger at the step than before the clip: a clip only shrinks."""
    for _, event in run.events("gradients"):
        at_step = event["at_step"] or {}
        for key, before in (event["synced"] or {}).items():
            if any(abs(b) > 1.001 * abs(a) + gradients.TINY for a, b in zip(before, at_step.get(key) or (), strict=False)):
                return True
    return False
