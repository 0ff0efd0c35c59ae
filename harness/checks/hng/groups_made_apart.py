"""HNG109 groups-made-apart: the ranks call new_group() with different lists of ranks

What it does
    Compares the lists of ranks that the script passes to `dist.new_group()`, call by call. An error in a run that hung or failed, a warning in one
    that came through.

Why it is bad
    Every rank of the job has to make every group, in the same order, its own or not: the calls are counted, and the n-th call of one rank meets the
    n-th of the others. Where each rank makes only its own group, members look for each other under names that do not fit, and the first collective
    in the group waits for ever.

Wrong
    group = dist.new_group(pairs[rank // 2])                  # another list on each rank

Right
    groups = [dist.new_group(pair) for pair in pairs]         # all of them, on every rank
    group = groups[rank // 2]

Known limits
    Calls with use_local_synchronization=True are the members' own affair. Looks at the first 64 calls of the script's own code.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Run


class GroupsMadeApart(Check):
    code = "HNG109"
    name = "groups-made-apart"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "HNG103", "HNG104", "HNG106", "LAU101", "LAU102", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        calls = [[e for e in r.of("new_group") if not e["local"]] for r in run.present]
        if len(calls) < 2 or not all(calls):
            raise NotApplicable("fewer than two ranks make groups")
        if run.live:
            return
        for nth in zip(*calls, strict=False):
            lists = [sorted(told, key=str) if isinstance(told := e["ranks"], list) else told for e in nth]  # torch sorts them too
            if all(told == lists[0] for told in lists):
                continue
            other = next(i for i, told in enumerate(lists) if told != lists[0])
            yield self.finding(
                f"the ranks make different groups by the same call: rank 0 one of {_said(lists[0])}, rank {other} one of {_said(lists[other])}",
                where=nth[0].where,
                ranks=run.rank_ids,
                notes=["the groups bear one name: this run came through, the next may hang or mix them up"] if run.finished else [],
                severity=Severity.WARNING if run.finished else None,
                help="call new_group() for every group on every rank, in the same order, and keep the one that this rank is in",
            )
            return


def _said(ranks: object) -> str:
    return blame.plural(ranks) if isinstance(ranks, list) else "all ranks"
