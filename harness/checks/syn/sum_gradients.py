"""SYN124 gradient-sum-not-averaged: gradients synced by hand, or by a communication hook of DDP, are summed and never divided

What it does
    Compares sampled gradient values after the backward (where a communication hook or hooks on parameters reduce: before them), on all ranks, with those at
    the optimizer step: the step's are the ranks' sum, although the loss is a mean and bears no factor.

Why it is bad
    The step is world_size times too large: the run needs another learning rate with every number of processes, and differs from
    one process on the same global batch.

Wrong
    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    dist.all_reduce(bucket.buffer(), async_op=True).get_future()      # in a communication hook: DDP divides no more

Right
    dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
    p.grad /= dist.get_world_size()

Known limits
    A loss that bears a factor (divided by the world size, or by the global batch) is not judged, unless the factor makes it the mean over the
    rank's own samples (`mse_loss(..., reduction="sum") / len(x)`) or over a step's micro-batches, if these are not as many as the ranks. One divided
    by a count of tokens that the batch's shape does not tell is not judged, nor one whose samples are masked or weighed before they are summed. Nor is
    a model of which a part is one rank's own, nor one whose forward takes features or statistics (of 16 numbers at least) of other ranks, each rank
    differentiating its own part: there the sum is the gradient. Nor are parts of a flat gradient that another parameter object takes (ZeRO by hand).
    Sees the first six steps; under a communication hook every 16th as well, up to about the thousandth.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import gradients, own_means, replicas
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Run, number

JOINING = {"all_reduce", "all_gather", *protocol.GATHER_INTO}
NUM_JOINED, MIN_SHARED = 5, 16  # steps; numbers, above what is reduced to be shown


class GradientSum(Check):
    code = "SYN124"
    name = "gradient-sum-not-averaged"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        replicas.require(run)
        losses = [e for _, e in run.events("loss")]
        if losses and all(own_means.may_divide(run, e) for e in losses):
            raise NotApplicable("the loss bears a factor of its own, which may stand for the division")
        ratios = gradients.ratios(run)
        if not ratios:
            raise NotApplicable("gradients are not synced by hand or by a communication hook, or not seen before the sync")
        if _joins_ranks(run):
            raise NotApplicable("the forward takes what other ranks have computed: each rank may differentiate its own part of one loss")
        hook = gradients.by_hook(run)
        for opt in sorted({o for o, _, _ in ratios}):
            seen = [(step, ratio) for o, step, ratio in ratios if o == opt]
            if own := gradients.partly(run, opt)[1] or gradients.lone(run, opt):
                raise NotApplicable(f"{own[0]} is one rank's own: a model in parts, of which the sum may be meant")
            since = _summed_since(seen, 0.1 if hook else 1e-3)  # hooks reduce in bfloat16 and the like
            if since is not None and (hook or since == seen[0][0]):
                yield self._summed(run, since, seen, hook)
                return

    def _summed(self, run: Run, since: int, seen: list[tuple[int, float]], hook: bool) -> Finding:
        losses = [e for _, e in run.events("loss")]
        sums = [ratio for step, ratio in seen if step >= since]
        late = f", from step {since} on at the latest" if since > seen[0][0] else ""
        where = "`bucket.buffer().div_(world_size)` before the hook's all_reduce" if hook else "`param.grad /= dist.get_world_size()` after the all_reduce"
        return self.finding(
            f"synced gradients are the sum over {run.world_size} ranks, not the mean{late}",
            where=_reduction_at(run, since),
            ranks=run.rank_ids,
            severity=None if all(e["reduction"] == "mean" or own_means.bears_no_division(run, e) for e in losses) else Severity.WARNING,
            notes=[
                f"gradient at the step = {sum(sums) / len(sums):.3f} x the sum of the ranks' own gradients, in {len(sums)} comparisons",
                *(["with a communication hook DDP does not divide: the hook has to"] if hook else []),
            ],
            help=f"divide by the number of ranks, {run.world_size} here: {where}",
        )


def _joins_ranks(run: Run) -> bool:
    """Whether as much as features or their statistics comes from other ranks before the backward, at most of the first steps; not the first, before which
    parameters are made equal."""
    steps = {
        e.step
        for _, e in run.events("coll")
        if e["op"] in JOINING and 1 <= e.step <= NUM_JOINED and number(e["numel"]) >= MIN_SHARED and "float" in str(e["dtype"])
        and not (e["graded"] or e["grad"] or e["inside"] or e["hook"])
    }  # fmt: skip
    return len(steps) > NUM_JOINED // 2


def _summed_since(ratios: list[tuple[int, float]], near: float) -> int | None:
    """The first step from which on gradients are sums; None where they are not sums at the end, or not at two steps or parameters at least."""
    since: int | None = None
    steps: dict[int, list[bool]] = {}
    for step, ratio in ratios:
        steps.setdefault(step, []).append(abs(ratio - 1.0) < near)
    for step in sorted(steps, reverse=True):
        if sum(steps[step]) < 0.9 * len(steps[step]):
            break
        since = step
    later = [hit for step, hits in steps.items() if since is not None and step >= since for hit in hits]
    enough = sum(later) >= 2 and (since == min(steps) or sum(step >= since for step in steps) >= 2) if since is not None else False
    return since if enough else None


def _reduction_at(run: Run, since: int) -> Where | None:
    """The reduction: in the hook, else of a gradient, else the first."""
    calls = [e for _, e in run.events("coll") if e["op"] in ("all_reduce", "reduce", "reduce_scatter", *protocol.REDUCE_SCATTER_INTO, "all_gather")]
    if gradients.by_hook(run):
        backward = {(w.file, w.line) for _, e in run.events("accumulation") if (w := e.where)}
        late = [e.where for e in calls if e["hook"] and e.step >= since and e.where and (e.where.file, e.where.line) not in backward]
        return next(iter(late), None) or replicas.first_where(run, "comm_hook")
    reductions = sorted((e for e in calls if e["op"] != "all_gather" and e.step >= since), key=lambda e: -number(e["numel"]))  # more than a metric
    return next((e.where for e in calls if e["grad"]), None) or next((e.where for e in reductions), None)
