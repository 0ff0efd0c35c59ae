"""EVL124 reduced-and-never-read: the ranks add up their numbers, nothing reads the sum, and each goes on with its own

What it does
    For a reduction of a tensor that the function makes of Python numbers, or of copies: reads in the function's source whether anything reads the tensor
    behind the call. A finding where nothing does, the numbers that it was made of are used on, and these differ between the ranks and from call to call.

Why it is bad
    The line looks as if the metric were that of all ranks. `all_reduce` changes the tensor that it is given and nothing else: the meter keeps the
    numbers of its own share, and rank 0 reports a part of the data as the whole.

Wrong
    def join(self):
        pair = torch.tensor([self.total, self.weight])
        dist.all_reduce(pair)
        return self

Right
    def join(self):
        pair = torch.tensor([self.total, self.weight])
        dist.all_reduce(pair)
        self.total, self.weight = pair.tolist()
        return self

Known limits
    Blocking calls that stand in a function, whose tensor is made there by torch.tensor, stack, cat or clone. Silent where the tensor's name occurs
    anywhere else in the function, and where the function, or another method of its class, has a collective whose result is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.evl import reductions
from harness.checks.evl.reductions import Reduction
from harness.model import Finding, Severity, Where
from harness.record import Run, where_of

MIN_CALLS = 2


class ReducedAndNeverRead(Check):
    code = "EVL124"
    name = "reduced-and-never-read"
    severity = Severity.WARNING
    explains = ("EVL102", "EVL115")

    def end(self, run: Run) -> Iterable[Finding]:
        passes.several_ranks(run)
        sites: dict[Where, list[Reduction]] = {}
        for one in reductions.aligned(run, totals=True):
            if one.kind != "gather" and one.where is not None:
                sites.setdefault(one.where, []).append(one)
        if not sites:
            raise NotApplicable("nothing small is reduced over the ranks")
        for where, series in sites.items():
            if _is_unread(series[0]) and _own(series):
                yield self._found(run, where, series)

    def _found(self, run: Run, where: Where, series: Sequence[Reduction]) -> Finding:
        told = series[0].events[0]["unread"]
        names, used = [str(n) for n in told.get("names") or ()], where_of(told.get("used"))
        last, at = series[-1], f" at line {used.line}" if used is not None else ""
        i = next((i for i in range(len(last.after)) if len({b[i] for b in last.before}) > 1), 0)
        return self.finding(
            f"nothing reads what this {last.events[0]['op']} gives: each rank goes on with its own {', '.join(names[:3])}, not with those of all ranks",
            where=where,
            ranks=run.rank_ids,
            notes=[
                f"used on{at}, after each of {len(series)} calls",
                f"the last one was given {', '.join(f'{b[i]:g}' for b in last.before[:8])} by the ranks and made {last.got(0)[i]:g} of it",
            ],
            help="write the result back: `self.total, self.weight = pair.tolist()`",
        )


def _is_unread(one: Reduction) -> bool:
    return all(isinstance(e["unread"], dict) for e in one.events)


def _own(series: Sequence[Reduction]) -> bool:
    """Numbers that the ranks measured, each for itself: they differ, and they change. A rank's number, or a setting, stays as it is."""
    moved = [len({r.before[rank] for r in series}) > 1 for rank in range(len(series[0].before))]
    return len(series) >= MIN_CALLS and all(moved) and any(len(set(r.before)) > 1 for r in series)
