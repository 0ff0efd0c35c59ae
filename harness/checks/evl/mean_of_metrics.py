"""EVL111 mean-of-metrics: each rank computes a metric of its own share, and the metrics are averaged over the ranks.

What it does
    For evaluations in which every rank measures a share of its own: follows, in the source, what is reduced afterwards back to where it was
    computed. A finding where that is a metric that is no mean over samples, the ranks gave different values, and their plain mean is taken.

Why it is bad
    F1, precision, recall, AUC, IoU, kappa, R2, correlation, perplexity are quotients or functions of totals. The mean of the metrics of parts is
    not the metric of the whole: it depends on the number of processes, and is off most where a class is rare.

Wrong
    f1 = 2 * tp / (2 * tp + fp + fn)
    dist.all_reduce(f1); f1 /= world_size

Right
    counts = torch.stack([tp, fp, fn]); dist.all_reduce(counts)
    f1 = 2 * counts[0] / (2 * counts[0] + counts[1] + counts[2])

Known limits
    Read from the source, by the usual names of such metrics: a warning where the quotient, the library's function, or the exp() or root of a
    mean is seen there, advice where only a name says it. Accuracies, losses, means per sample (a dice of each image, recall@k) are means, and
    healthy here. Needs the number in a printed or logged line or a TensorBoard scalar unless the reduction itself averages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import evaluations, reductions, reports
from harness.checks.evl.reductions import Reduction
from harness.checks.evl.unequal_means import follows
from harness.model import Finding, Severity, Where
from harness.record import Run, number

HOW = {
    "ratio": "a quotient of counts",
    "call": "a metric of a whole set of predictions",
    "exp": "the exponential of a mean",
    "root": "the root of a mean",
}


class MeanOfMetrics(Check):
    code = "EVL111"
    name = "mean-of-metrics"
    severity = Severity.WARNING
    explains = ("EVL108",)

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        shares = [g for g in evaluations.aligned(run) if evaluations.sharded(g)]
        if not shares:
            raise NotApplicable("no evaluation in which each rank measures a share of its own")
        told = _told(run)
        for one in reductions.aligned(run) if told else ():
            metric = told.get(one.where)
            if metric is None or one.kind not in ("sum", "avg", "gather") or not any(follows(one, g, run) for g in shares):
                continue
            found = self._averaged(run, one, metric)
            if found is not None:
                yield found
                return

    def _averaged(self, run: Run, one: Reduction, metric: Mapping[str, object]) -> Finding | None:
        at, how = number(metric.get("index")), str(metric.get("how"))
        local = [b[at] for b in one.before if at < len(b)]
        if len(local) < run.world_size or max(local) - min(local) < 1e-9 or not reductions.mean_like(local):
            return None
        mean = sum(local) / len(local)
        if one.kind != "avg" and not _reported(run, one, mean):
            return None
        return self.finding(
            f"every rank computes {metric.get('metric')} on its own share, and the {len(local)} values are averaged: their mean is not that of "
            "the whole set",
            where=one.where,
            ranks=run.rank_ids,
            notes=[f"by rank: {', '.join(f'{v:.4g}' for v in local[:8])}; mean {mean:.6g}", *([f"it is {HOW[how]}"] if how in HOW else [])],
            help="all-reduce the counts (or gather predictions and labels), and compute the metric of the totals",
            severity=None if how in HOW else Severity.ADVICE,
            evidence={"metric": metric.get("metric"), "how": how},
        )


def _told(run: Run) -> dict[Where | None, Mapping[str, object]]:
    """Statement that reduces -> the metric that goes in, as rank 0's source shows it."""
    recording = run.ranks[0]
    events = [e for kind in ("reduced", "gathered") for e in recording.of(kind)] if recording is not None else []
    return {e.where: e["metric"] for e in events if isinstance(e["metric"], Mapping)}


def _reported(run: Run, one: Reduction, mean: float) -> bool:
    """The plain mean is in a line after it, of the same step."""
    for rank in range(run.world_size):
        later = [r for r in reports.all_reports(run)[rank] if r.t_ns > one.at_t(rank) and r.step == one.step(rank)]
        if any(v.digits >= 2 and (v.is_near(mean) or v.is_near(100 * mean)) for r in later for v in r.values()):
            return True
    return False
