"""Whether a number of a line is a rank's own in nearly all reports of that line: in one of many it is so by chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

from harness.checks.evl import beside, measured
from harness.checks.evl.losses import Epoch
from harness.checks.evl.measured import Measured
from harness.checks.evl.reports import Report, all_reports
from harness.record import Run

SHARE = 0.8  # of the reports that can tell


def between(run: Run, rank: int, since_ns: int, step: int) -> list[Report]:
    return [r for r in all_reports(run)[rank] if r.t_ns > since_ns and r.step == step]


def reported(run: Run, one: Measured) -> list[Report]:
    """What the rank reports after a measurement and before its next one by the same statement."""
    later = (m.first_t for m in measured.of_rank(run, one.rank) if m.where == one.where and m.first_t > one.last_t)
    until = min(later, default=1 << 63)
    return [r for r in between(run, one.rank, one.last_t, one.at) if r.t_ns < until]


def is_own(run: Run, one: Measured, report: Report, place: int, groups: Sequence[Sequence[Measured]]) -> bool:
    """The number at this place of such lines is the mean of what its rank measured, and stands beside none of all ranks."""
    return _once(run, (one.rank, one.where, one.of, report.form, place), lambda: _is_own(run, one, report, place, groups))


def is_own_loss(run: Run, epoch: Epoch, report: Report, place: int, epochs: Sequence[Epoch]) -> bool:
    """The number at this place of such lines is the mean of its rank's own training losses."""
    return _once(run, (report.rank, epoch.group[0].key, report.form, place), lambda: _is_own_loss(run, epoch, report, place, epochs))


def _once(run: Run, key: Hashable, ask: Callable[[], bool]) -> bool:
    """Asked once a judgement, however many of the lines look like it."""
    known: dict[Hashable, bool] = run.__dict__.setdefault("_usual", {})
    if key not in known:
        known[key] = ask()
    return known[key]


def _is_own(run: Run, one: Measured, report: Report, place: int, groups: Sequence[Sequence[Measured]]) -> bool:
    told: list[bool | None] = []
    extremes: list[float] = []  # of what was measured so far: a line may show the best of it
    for group in groups:
        own = next((m for m in group if (m.rank, m.where, m.of) == (one.rank, one.where, one.of)), None)
        if own is None:
            continue
        for line in reported(run, own):
            if line.form == report.form and len(line.values()) > place:
                told.append(_tells(run, line, place, own, groups, group, extremes))
        known = [*extremes, *(m for m in own.means if math.isfinite(m))]
        extremes = [min(known), max(known)] if known else []
    return _nearly_all(told)


def _is_own_loss(run: Run, epoch: Epoch, report: Report, place: int, epochs: Sequence[Epoch]) -> bool:
    told = []
    for other in (e for e in epochs if e.group[0].key == epoch.group[0].key):
        closed = other.group[report.rank].closed
        for line in between(run, report.rank, closed.t_ns, closed.step) if closed is not None else ():
            if line.form == report.form and len(line.values()) > place:
                told.append(other.tells(line.values()[place], report.rank))
    return _nearly_all(told)


def _tells(
    run: Run, line: Report, place: int, own: Measured, groups: Sequence[Sequence[Measured]], group: Sequence[Measured], extremes: Sequence[float]
) -> bool | None:
    value = line.values()[place]
    told = measured.tells(value, own, group)
    if told:
        beside_whole = beside.whole(run, line, place, own, groups)
        return None if beside_whole is None else not beside_whole
    return None if any(not value.is_far(v) or not value.is_far(100 * v) for v in extremes) else told


def _nearly_all(told: Sequence[bool | None]) -> bool:
    known = [t for t in told if t is not None]
    return any(known) and sum(known) >= SHARE * len(known)
