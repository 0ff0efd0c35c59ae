"""EVL108 mean-of-unequal-means: means over shares of unequal size are averaged with equal weight.

What it does
    For evaluations in which the ranks measure on unequal numbers of samples: looks whether means are reduced, and their plain average is
    reported, while no count is reduced that could weigh them.

Why it is bad
    A sample of a small share weighs more than one of a large share: the number is not the mean over the data.

Wrong
    mean = loss_sum / count; dist.all_reduce(mean); mean /= world_size

Right
    totals = torch.stack([loss_sum, count]); dist.all_reduce(totals); mean = totals[0] / totals[1]

Known limits
    Needs the number in a printed or logged line or a TensorBoard scalar. Shares that a sampler made equal are healthy here (but see
    EVL101). So are training losses that are averaged after an evaluation, and what the same calls reduce at steps without one
    (where they reduce twice at a step, of the training and of the evaluation, it is what each of them counted).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import evaluations, not_measured, reductions, reports
from harness.checks.evl.evaluations import Evaluation
from harness.checks.evl.reductions import Reduction
from harness.model import Finding, Severity
from harness.record import Run


class MeanOfUnequalMeans(Check):
    code = "EVL108"
    name = "mean-of-unequal-means"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        unequal = [g for g in evaluations.aligned(run) if len({e.num_samples for e in g}) > 1 and evaluations.sharded(g)]
        if not unequal:
            raise NotApplicable("no evaluation over shares of unequal size")
        reduced = [r for r in reductions.aligned(run) if r.kind in ("sum", "avg", "gather")]
        for group in unequal:
            after = [r for r in reduced if follows(r, group, run)]
            if not after or any(_counts(r, group) for r in after):
                continue
            for one in after:
                if not_measured.goes_without(one, run):
                    continue
                found = self._averaged(run, group, one)
                if found is not None:
                    yield found
                    return

    def _averaged(self, run: Run, group: Sequence[Evaluation], one: Reduction) -> Finding | None:
        for i, value in enumerate(one.after):
            local = [b[i] for b in one.before]
            mean = value if one.kind == "avg" else value / run.world_size
            if not reductions.mean_like(local) or not_measured.are_losses(local, one, run):
                continue
            for rank in range(run.world_size):
                later = [r for r in reports.all_reports(run)[rank] if r.t_ns > one.at_t(rank) and r.step == one.step(rank)]
                for report in later:
                    if any(v.digits >= 2 and (v.is_near(mean) or v.is_near(100 * mean)) for v in report.values()):
                        sizes = [e.num_samples for e in group]
                        right = sum(v * n for v, n in zip(local, sizes, strict=True)) / sum(sizes)
                        return self.finding(
                            f"the means of shares with {', '.join(str(n) for n in sizes[:8])} samples are averaged with equal weight",
                            where=one.where,
                            ranks=run.rank_ids,
                            notes=[
                                f"reported {mean:.6g}; weighted by the samples it is {right:.6g}",
                                f"means by rank: {', '.join(f'{v:.4g}' for v in local[:8])}",
                            ],
                            help="all-reduce the sum and the number of samples, and divide the totals",
                        )
        return None


def follows(one: Reduction, group: Sequence[Evaluation], run: Run) -> bool:
    """A reduction after this evaluation and before the next one of each rank, with no step between."""
    for rank, own in enumerate(group):
        later = min((e.opened_ns for e in evaluations.by_rank(run)[rank] if e.opened_ns > own.ended_ns), default=1 << 63)
        if not own.opened_ns < one.at_t(rank) < later or one.step(rank) != own.step:
            return False
    return True


def _counts(one: Reduction, group: Sequence[Evaluation]) -> bool:
    """The number of samples is reduced too: the means can be weighed, or are sums."""
    width = len(one.after)
    return any(all(abs(one.before[r][i] - e.num_samples) < 0.5 for r, e in enumerate(group)) for i in range(width))
