"""Counts of one rank's share that are divided by the number of samples of the whole set, and reported by one rank."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.evl import reports
from harness.checks.evl.reports import Report
from harness.model import Where
from harness.record import Run, number, where_of


@dataclass(frozen=True)
class Divided:
    """A pass over a share, the division behind it, and the line that reports a number before anything is synchronised."""

    one: Pass
    where: Where
    report: Report


def first(run: Run) -> Divided | None:
    table = {e.where: found for _, e in run.events("loop") if e["of"] == "loader" and (found := where_of(e["whole"])) is not None}
    for one in passes.all_passes(run) if table else ():
        where = table.get(one.where)
        if where is None or not _share(one):
            continue
        report = next((r for r in reports.all_reports(run)[one.rank] if _speaks(run, one, r)), None)
        if report is not None:
            return Divided(one, where, report)
    return None


def _share(one: Pass) -> bool:
    """A whole pass over a part of the data set that a distributed sampler dealt out, without a collective of the script's in it."""
    told = one.distributed or {}
    part = number(told.get("num_replicas")) > 1 and 0 < one.num_samples < 0.75 * one.dataset_len
    return part and one.exhausted and one.closed is not None and not number(one.closed["collectives"])


def _speaks(run: Run, one: Pass, report: Report) -> bool:
    if one.closed is None or report.t_ns < one.closed.t_ns or report.step != one.closed.step or report.y != number(one.closed["y"]):
        return False
    metric = report.kind == "scalar" or reports.METRIC.search(report.text) is not None
    return metric and not report.tagged and bool(report.values()) and reports.num_ranks_at(run, report.where) == 1
