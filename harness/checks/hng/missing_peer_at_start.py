"""HNG104 missing-peer-at-start: ranks wait in init_process_group for others that do not come.

What it does
    In a run that stands still, some ranks are inside init_process_group, or inside a TCPStore that they make for it. The finding names
    the ranks that are missing and what they do instead, the addresses where those differ, or an address that the machine of rank 0 does
    not have. An error. Ranks that the script spawned itself count where they asked for a group.

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
from harness.record import Event, Recording, Run, number

ON_THIS_MACHINE = (
    "do not set MASTER_ADDR in the script: torchrun sets it; where the script starts all ranks itself, on one machine, it is 127.0.0.1, "
    "on several an address of the machine of rank 0"
)


class MissingPeerAtStart(Check):
    code = "HNG104"
    name = "missing-peer-at-start"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "LAU101", "LAU121", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if not waits.hung(run):
            if run.finished and not run.live:
                return  # every rank met the others, as the checks beside this one say too
            raise NotApplicable("the run neither hung nor came to its end")
        ranked = rendezvous.ranked(run)
        stuck = [(rank, r, event) for rank, r in ranked if (event := rendezvous.waiting(r)) is not None]
        if not stuck:
            return
        inside = {rank for rank, _, _ in stuck}
        call = "TCPStore" if all(event.kind == "store" for _, _, event in stuck) else "init_process_group"
        world_size = max([run.plan.world_size, *(_asked_world_size(r, event) for _, r, event in stuck)])
        missing = [rank for rank in range(world_size) if rank not in inside]
        places = {rank: rendezvous.address(r) for rank, r, _ in stuck}
        if not missing and len(set(places.values())) > 1:
            yield self.finding(
                f"{blame.plural(sorted(inside))} wait in {call}, each at an address of its own",
                where=stuck[0][2].where,
                ranks=sorted(inside),
                notes=[f"rank {rank}: {place}" for rank, place in sorted(places.items())[:8]],
                help="choose address and port once, before the ranks are started, and hand them to all",
            )
            return
        elsewhere, set_at = rendezvous.foreign([(rank, r) for rank, r, _ in stuck])
        if elsewhere:
            yield self.finding(
                f"{blame.plural(sorted(inside))} wait{'s' if len(inside) == 1 else ''} for each other at {elsewhere}, which is no address of "
                "rank 0's machine",
                where=set_at or stuck[0][2].where,
                ranks=sorted(inside),
                notes=[f"the call is at line {event.where.line}" for _, _, event in stuck[:1] if event.where is not None and set_at is not None],
                help=ON_THIS_MACHINE,
            )
            return
        standing = {w.rank: w.sentence for w in waits.waits(run)}
        message = f"{blame.plural(sorted(inside))} wait{'s' if len(inside) == 1 else ''} in {call}"
        yield self.finding(
            f"{message}; {blame.plural(missing)} never came" if missing else f"{message} although all came",
            where=stuck[0][2].where,
            ranks=missing or sorted(inside),
            notes=[f"rank {rank} {standing.get(rank, 'did not report')}" for rank in missing[:8]],
            help=f"call {call} on every rank that the launcher started, with the same address and world size",
        )


def _asked_world_size(recording: Recording, event: Event) -> int:
    return number(event["world_size"], 1) if event.kind == "store" else rendezvous.effective(recording)[1]
