"""EVL117 totals-kept: an evaluation counts on from the one before.

What it does
    Follows whole numbers that the ranks reduce right after each evaluation over a loader. A finding where such a number is, on every rank, the number
    of samples of one evaluation, then of two, then of three.

Why it is bad
    What was measured with older weights is averaged in: the metric follows late, the best epoch is picked by a mean over all epochs, and lists of
    predictions grow for as long as the run lasts.

Wrong
    def evaluate(self):
        for x, y in self.loader:
            self.predictions.append(self.model(x))    # made once, in __init__, and never emptied

Right
    def evaluate(self):
        self.predictions = []                         # metric.reset(), where a metric object holds the counts

Known limits
    Needs three evaluations of one loader on several ranks, another number of samples than an epoch of training has, and the count of samples in
    a reduction of at most eight elements. Where a count that starts anew is reduced
    as well, the other one is for the log. Running means of the training loss are the script's own business.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.evl import evaluations, reductions
from harness.checks.evl.evaluations import Evaluation
from harness.checks.evl.reductions import Reduction
from harness.model import Finding, Severity, Where
from harness.record import Run

MIN_EVALUATIONS = 3


class TotalsKept(Check):
    code = "EVL117"
    name = "totals-kept"
    severity = Severity.WARNING
    explains = ("MEM103",)

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        series: dict[object, list[list[Evaluation]]] = {}
        for group in evaluations.aligned(run):
            if all(e.one is not None and e.one.exhausted for e in group):
                series.setdefault(group[0].key, []).append(group)
        long = [s for s in series.values() if len(s) >= MIN_EVALUATIONS]
        sums = [r for r in reductions.aligned(run) if r.kind == "sum"]
        if not long or not sums:
            raise NotApplicable("no three evaluations of one loader whose totals are reduced")
        trained = {p.num_samples for p in passes.training(run)}  # a count of these is not the evaluation's
        for groups in long:
            one = groups[0][0]
            where = _counted_on(groups, sums) if one.num_samples not in trained else None
            if where is not None:
                yield self.finding(
                    f"each evaluation counts on from the one before: after {len(groups)} evaluations of {one.num_samples} samples "
                    f"the ranks reduce a count of {len(groups) * one.num_samples}",
                    where=one.where or where,
                    ranks=run.rank_ids,
                    notes=[f"so it was after each of the {len(groups)} evaluations, on every rank, at {where.file.rpartition('/')[-1]}:{where.line}"],
                    help="empty the lists and counters, or reset() the metric, before each evaluation",
                    evidence={"samples": one.num_samples, "evaluations": len(groups)},
                )
                return


def _counted_on(groups: list[list[Evaluation]], sums: list[Reduction]) -> Where | None:
    """The reduction of which one element is the n-fold number of samples after the n-th evaluation, on every rank, each time."""
    told: dict[tuple[Where | None, int], int] = {}
    for nth, group in enumerate(groups, 1):
        for key in {(r.where, i) for r in _behind(group, sums) for i in range(len(r.after)) if _is(r, i, group, nth)}:
            told[key] = told.get(key, 0) + 1
    where = next((where for (where, _), num in told.items() if num == len(groups)), None)
    fresh = all(any(_is(r, i, group, 1) for r in _behind(group, sums) for i in range(len(r.after))) for group in groups)
    return None if fresh else where  # counted anew as well: the other is a number of all evaluations so far, for the log


def _behind(group: Sequence[Evaluation], sums: list[Reduction]) -> list[Reduction]:
    """Reductions after this measurement and before the next step of training."""
    return [r for r in sums if all(e.ended_ns <= r.at_t(e.rank) and e.step == r.step(e.rank) for e in group)]


def _is(one: Reduction, element: int, group: Sequence[Evaluation], nth: int) -> bool:
    return all(e.num_samples > 1 and one.before[e.rank][element] == nth * e.num_samples for e in group)
