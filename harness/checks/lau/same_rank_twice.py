"""LAU114 same-rank-twice: two processes believe to be the same rank.

What it does
    Compares the rank that each process brought to its rendezvous: what it passed to init_process_group, else RANK in its environment at
    that moment. An error.

Why it is bad
    Two rank 0 want to listen on one port: torch says "address already in use", which sends the search to the network. Or the group waits
    for a rank that never comes.

Wrong
    dist.init_process_group("nccl", rank=int(os.environ.get("SLURM_NODEID", 0)), world_size=world)

Right
    dist.init_process_group("nccl")      # RANK, not the node's number and not LOCAL_RANK

Known limits
    Ranks that never reach init_process_group are not compared, nor is one that asks when the other has given its group up or ended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame, rendezvous
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Recording, Run


class SameRankTwice(Check):
    code = "LAU114"
    name = "same-rank-twice"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU113", "LAU121", "LAU124", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        tried = [r for r in run.processes if r.of("rendezvous")]
        if len(tried) < 2:
            raise NotApplicable("fewer than two processes asked for a process group")
        groups: dict[tuple[int, str], list[Recording]] = {}
        for recording in tried:
            rank, world = rendezvous.effective(recording)
            if rank >= 0 and world > 1:
                groups.setdefault((rank, _place(recording)), []).append(recording)
        doubled = [(key, same) for key, claims in groups.items() if len(same := _at_one_time(claims)) > 1]
        if not doubled:
            return
        (rank, _), same = doubled[0]
        launched = sorted(r.env_rank for r in same if r.env_rank >= 0)
        yield self.finding(
            f"{len(same)} processes ask to be rank {rank}",
            where=same[0].of("rendezvous")[-1].where,
            ranks=launched,
            notes=[f"the launcher started them as {blame.plural(launched)}" if launched else "they were made by the script itself"],
            help='take the rank from the launcher: `rank=int(os.environ["RANK"])`, or call init_process_group without rank',
        )


def _at_one_time(claims: list[Recording]) -> list[Recording]:
    """Those that hold the rank while another one does: phases that spawn their processes one after the other follow each other."""
    held = {id(r): (r.of("rendezvous")[-1].t_ns, _left_at(r)) for r in claims}
    return [r for r in claims if any(o is not r and held[id(r)][0] < held[id(o)][1] and held[id(o)][0] < held[id(r)][1] for o in claims)]


def _left_at(recording: Recording) -> float:
    """When it gave its group up or ended; infinite where it did neither."""
    return min((e.t_ns for kind in ("pg_destroy", protocol.END) for e in recording.of(kind)), default=math.inf)


def _place(recording: Recording) -> str:
    event = recording.of("rendezvous")[-1]
    method = event["method"]
    return str(method) if method and method != "env://" else f"{event['address']}:{event['port']}"
