"""HNG104 missing-peer-at-start: ranks wait in init_process_group for others that do not come.

What it does
    In a run that stands still, some ranks are inside init_process_group. The finding names the ranks that are missing and what they do
    instead. An error.

Why it is bad
    The default patience of torch is 10 to 30 minutes, and its message names no rank.

Wrong
    if args.distributed and rank < 4:
        dist.init_process_group("gloo")       # 8 ranks were started

Right
    dist.init_process_group("gloo")           # on every rank that the launcher started

Known limits
    Whether a rank on another node was started at all is seen only where that node writes into the same run folder.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.hng import waits
from harness.checks.lau import blame, rendezvous
from harness.model import Finding, Severity
from harness.record import Run


class MissingPeerAtStart(Check):
    code = "HNG104"
    name = "missing-peer-at-start"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "LAU101", "LAU121", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if not waits.hung(run):
            raise NotApplicable("the run did not hang")
        stuck = [(rank, r, event) for rank, r in rendezvous.mains(run) if (event := rendezvous.waiting(r)) is not None]
        if not stuck:
            return
        inside = {rank for rank, _, _ in stuck}
        missing = [rank for rank in range(run.plan.world_size) if rank not in inside]
        standing = {w.rank: w.sentence for w in waits.waits(run)}
        message = f"{blame.plural(sorted(inside))} wait{'s' if len(inside) == 1 else ''} in init_process_group"
        yield self.finding(
            f"{message}; {blame.plural(missing)} never came" if missing else f"{message} although all came",
            where=stuck[0][2].where,
            ranks=missing or sorted(inside),
            notes=[f"rank {rank} {standing.get(rank, 'did not report')}" for rank in missing[:8]],
            help="call init_process_group on every rank that the launcher started, with the same address and world size",
        )
