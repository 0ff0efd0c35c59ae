"""EVL116 sum-by-own-count: what all ranks counted is divided by the number of samples of one rank.

What it does
    For evaluations in which every rank measures its own share: compares reported numbers with what the ranks added up, divided by the reporting
    rank's own samples. A finding where that is what stands in the line after each evaluation.

Why it is bad
    The numerator was all-reduced and the denominator was not: the number is world_size times the right one, an accuracy goes beyond 1, and it grows
    with the number of processes.

Wrong
    dist.all_reduce(correct)
    accuracy = correct / num_samples                  # of this rank

Right
    counts = torch.tensor([correct, num_samples]); dist.all_reduce(counts)
    accuracy = counts[0] / counts[1]

Known limits
    Needs the number in a line or a TensorBoard scalar with three digits, after two evaluations or more, or a share of hits above 1. Sums that are divided by
    world_size again are healthy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.checks.evl import evaluations, reductions, reports
from harness.checks.evl.evaluations import Evaluation
from harness.checks.evl.reductions import Reduction
from harness.checks.evl.reports import Report, Value
from harness.model import Finding, Severity, Where
from harness.record import Run

MIN_DIGITS = 3
MIN_SAMPLES = 8
MAX_EVALUATIONS = 64


@dataclass(frozen=True)
class Match:
    """One number of a line that is a sum over the ranks, divided by one rank's count."""

    report: Report
    value: Value
    summed: Where | None  # the reduction, and which of its elements
    element: int
    right: float
    beyond_one: bool  # a share of hits above 1

    @property
    def key(self) -> tuple[Where | None, Where | None, int]:
        return self.report.where, self.summed, self.element


class SumByOwnCount(Check):
    code = "EVL116"
    name = "sum-by-own-count"
    severity = Severity.WARNING
    explains = ("OUT105",)

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        groups = [g for g in evaluations.aligned(run) if evaluations.sharded(g)]
        sums = [r for r in reductions.aligned(run) if r.kind == "sum"]
        if not groups or not sums:
            raise NotApplicable("no sum over the ranks is reported after an evaluation over shares")
        for rank in range(min(run.world_size, 8)):
            told: dict[object, list[Match]] = {}
            looked: Counter[Where | None] = Counter()
            for group in groups[:MAX_EVALUATIONS]:
                for report in _after(run, group, rank, groups):
                    looked[report.where] += 1
                    for match in _matches(report, group, rank, sums):
                        told.setdefault(match.key, []).append(match)
            for found in told.values():
                last = found[-1]
                if len(found) == looked[last.report.where] and (len({m.value.value for m in found}) > 1 or last.beyond_one):
                    yield self._found(run, last)
                    return

    def _found(self, run: Run, one: Match) -> Finding:
        rank, where = one.report.rank, one.report.where
        line = f"line {where.line}" if where else "a line"
        return self.finding(
            f"{line} reports the sum over {run.world_size} ranks divided by the samples of rank {rank} alone: {one.value.value:g}, where {one.right:.6g} is right",
            where=reductions.divided_at(run, one.summed) or where,
            ranks=(rank,),
            notes=[f"reported: {one.report.text[:120]}"],
            help="all-reduce the number of samples as well, and divide the two sums",
            evidence={"reported": one.value.value, "right": one.right},
        )


def _after(run: Run, group: Sequence[Evaluation], rank: int, groups: Sequence[Sequence[Evaluation]]) -> list[Report]:
    """What the rank reports between this measurement and the next one, in the same step."""
    own = group[rank]
    until = min((g[rank].opened_ns for g in groups if g[rank].opened_ns > own.ended_ns), default=1 << 63)
    return [r for r in reports.all_reports(run)[rank] if own.ended_ns < r.t_ns < until and r.step == own.step and not r.tagged][:8]


def _matches(report: Report, group: Sequence[Evaluation], rank: int, sums: list[Reduction]) -> Iterable[Match]:
    own, total = group[rank].num_samples, sum(e.num_samples for e in group)
    if not MIN_SAMPLES <= own < total:  # a sum divided by two may be a mean over two ranks
        return
    between = [r for r in sums if group[rank].ended_ns < r.at_t(rank) < report.t_ns and r.step(rank) == report.step]
    numbers = [v for r in between for v in (*r.got(rank), *r.before[rank])]
    known = [*numbers, *(v / n for v in numbers for n in (total, own * len(group), len(group)))] + [v / own for r in between for v in r.before[rank]]
    for one in between:
        for i, after in enumerate(one.got(rank)):
            for value in report.values() if after > 0 else ():
                if value.digits >= MIN_DIGITS and _says(value, after / own) and not any(_says(value, other) for other in known):
                    hits = all(float(b[i]).is_integer() for b in one.before)
                    scale = 1 if value.is_near(after / own) else 100
                    yield Match(report, value, one.where, i, scale * after / total, hits and after > own)


def _says(value: Value, number: float) -> bool:
    """As it is or in percent."""
    return value.is_near(number) or value.is_near(100 * number)
