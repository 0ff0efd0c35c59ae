"""EVL107 metric-sum-not-divided: a sum over the ranks is reported as if it were a mean.

What it does
    Compares reported numbers with what the ranks reduced: a sum of means (accuracies, mean losses) that is reported as it is, and a
    training loss that is world_size times the mean over all ranks' steps.

Why it is bad
    The number grows with the number of processes: an accuracy above 1, a loss that doubles when the job does.

Wrong
    dist.all_reduce(accuracy); print(accuracy)

Right
    dist.all_reduce(accuracy); accuracy /= world_size

Known limits
    Needs the number in a printed or logged line or a TensorBoard scalar, with three digits. Sums that a line calls sum or total are
    healthy, so are those of what the source divides by the number of ranks, before or behind the call, and of losses that are shares of one
    mean: divided by the count of all ranks or the number of ranks, or with gradients that are summed up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import losses, measured, reductions, reports
from harness.checks.evl.losses import Epoch
from harness.checks.evl.reductions import Reduction
from harness.checks.evl.reports import Report, Value
from harness.checks.opt import shares
from harness.checks.syn import gradients
from harness.model import Finding, Severity, Where
from harness.record import Run

SUMMED = re.compile(r"\bsum|total|count|correct|\bnum", re.IGNORECASE)
RATIO = re.compile(r"acc|prec|recall|f1|iou|auc|dice|top-?[15]|rate|err", re.IGNORECASE)


class MetricSumNotDivided(Check):
    code = "EVL107"
    name = "metric-sum-not-divided"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        told = [r for own in reports.all_reports(run)[:8] for r in own[:200] if reports.METRIC.search(r.text) and not SUMMED.search(r.text)]
        divided = {e.where for _, e in run.events("reduced") if e["by_ranks"]}  # a number may be the sum of two others by chance
        sums = [r for r in reductions.aligned(run) if r.kind in ("sum", "gather") and r.where not in divided]
        epochs = [] if _are_shares(run) else losses.epochs(run)
        if not told or not (sums or epochs):
            raise NotApplicable("no metric is reduced and reported")
        for report in told:
            for value in report.values():
                if value.digits < 3:
                    continue
                found = self._mean_summed(run, report, value, sums) or self._epoch_summed(run, report, value, sums, epochs)
                if found is not None:
                    yield found
                    return

    def _mean_summed(self, run: Run, report: Report, value: Value, sums: list[Reduction]) -> Finding | None:
        """The sum itself is reported, and what went in were means."""
        for one in _before(sums, report):
            for i, after in enumerate(one.after):
                local = [b[i] for b in one.before]
                if not reductions.mean_like(local) or min(local) == 0 or not (value.is_near(after) or value.is_near(100 * after)):
                    continue
                if any(value.is_near(b) or value.is_near(100 * b) for b in local) or _mean_of_another(run, value, _before(sums, report), (one, i)):
                    continue
                if _are_means(local, report, run, one):
                    return self._found(
                        run,
                        report,
                        one.where,
                        f"{value.value:g} is the sum of the ranks' means ({', '.join(f'{b:.4g}' for b in local[:4])})",
                        after / run.world_size,
                    )
        return None

    def _epoch_summed(self, run: Run, report: Report, value: Value, sums: list[Reduction], epochs: list[Epoch]) -> Finding | None:
        """world_size times the mean loss of the epoch before."""
        earlier = [e for e in epochs if (c := e.group[report.rank].closed) is not None and c.t_ns < report.t_ns and c.step == report.step]
        for epoch in earlier[-1:]:
            if epoch.num_steps[0] < 2 or not value.is_near(epoch.total) or any(value.is_near(m) for m in (*epoch.means, epoch.mean)):
                continue
            reduced = [r for r in _before(sums, report) if r.step(report.rank) == report.step]
            where = next((r.where for r in reduced if _holds(r, epoch)), reduced[0].where if reduced else report.where)
            return self._found(
                run, report, where, f"{value.value:g} is {run.world_size} times the mean loss of the epoch over all ranks", epoch.mean
            )
        return None

    def _found(self, run: Run, report: Report, where: Where | None, what: str, right: float) -> Finding:
        line = f"line {report.where.line}" if report.where else "a line"
        return self.finding(
            f"{line} reports a sum over the ranks that was never divided: {what}",
            where=reductions.divided_at(run, where) or report.where,
            ranks=(report.rank,),
            notes=[f"reported: {report.text[:120]}", f"divided by {run.world_size} it is {right:.6g}"],
            help="divide by `dist.get_world_size()` after the all-reduce (or reduce sums and counts, and divide those)",
        )


def _before(sums: list[Reduction], report: Report) -> list[Reduction]:
    """Reductions before a report with no step of training between, latest first."""
    return [r for r in reversed(sums) if r.at_t(report.rank) < report.t_ns and report.step - r.step(report.rank) <= 1][:16]


def _mean_of_another(run: Run, value: Value, reduced: list[Reduction], summed: tuple[Reduction, int]) -> bool:
    """What is reported is also a mean over the ranks, of another metric: top-1 adds up to what top-5 is on average."""
    means = [v / run.world_size for one in reduced for i, v in enumerate(one.after) if (one, i) != summed]
    return any(value.is_near(m) or value.is_near(100 * m) for m in means)


def _holds(one: Reduction, epoch: Epoch) -> bool:
    """The reduction of the epoch's summed losses."""
    total = sum(m * n for m, n in zip(epoch.means, epoch.num_steps, strict=True))
    return any(abs(v - total) <= 1e-4 * abs(total) + 1e-9 or abs(v - epoch.total) <= 1e-4 * abs(epoch.total) + 1e-9 for v in one.after)


def _are_means(local: list[float], report: Report, run: Run, one: Reduction) -> bool:
    """Ratios between 0 and 1 under such a name, or losses that are known as means of this rank."""
    ratios = all(0 < v <= 1 for v in local) and RATIO.search(report.text) is not None
    return not _are_losses(local, run, one) and ratios if _are_shares(run) else ratios or _are_losses(local, run, one)


def _are_shares(run: Run) -> bool:
    """The ranks' losses add up to the mean over all: each is divided by the count of all ranks or by their number, or bears another factor and
    their gradients are summed up."""
    ratios = [ratio for _, _, ratio in gradients.ratios(run)]
    summed = len(ratios) > 1 and all(abs(r - 1) < 1e-3 for r in ratios)
    return bool(shares.of(run)) or _divided_by_ranks(run) or (summed and all(e["scaled"] for _, e in run.events("loss")))


def _divided_by_ranks(run: Run) -> bool:
    """The last thing that is done to each loss is a division by a number as large as that of the ranks (theirs, or that of the micro-batches):
    what it was before, which is what a script shows, is so many times the loss that backward saw."""
    told = [[e["value"] for e in r.of("divisor")] for r in run.present]
    return all(len(own) > 1 and all(v == run.world_size for v in own) for own in told)


def _are_losses(local: list[float], run: Run, one: Reduction) -> bool:
    """Known as means of this rank's losses."""
    epochs = losses.epochs(run)
    steps = [one.step(r) for r in range(run.world_size)]
    for rank, value in enumerate(local):
        recording = run.ranks[rank]
        known = [e.means[rank] for e in epochs] + [e.lasts[rank] for e in epochs]
        known += [v for m in measured.of_rank(run, rank) if m.at == one.step(rank) for v in m.means]
        if recording is not None:
            known += [recording.row(i).loss for s in (steps[rank] - 1, steps[rank]) if (i := recording.step_index.get(s)) is not None]
        if not any(abs(value - k) <= 1e-5 * max(abs(k), 1e-9) for k in known):
            return False
    return True
