"""LAU114 same-rank-twice: two processes believe to be the same rank.

What it does
    Compares the rank that each process brought to its rendezvous: what it passed to init_process_group, else RANK in its environment at
    that moment. An error. So too for processes that the script starts and that each take rank 0 of 1 from the environment of the one that started
    them.

Why it is bad
    Two rank 0 want to listen on one port: torch says "address already in use", which sends the search to the network. Or the group waits
    for a rank that never comes.

Wrong
    dist.init_process_group("nccl", rank=int(os.environ.get("SLURM_NODEID", 0)), world_size=world)

Right
    dist.init_process_group("nccl")      # RANK, not the node's number and not LOCAL_RANK

Known limits
    Ranks that never reach init_process_group are not compared, nor is one that asks when the other has given its group up, ended or was
    killed. Where each rank of the launcher spawns a world of its own, that is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness import worlds
from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame, rendezvous
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Event, Recording, Run, number

BEATS_NS = 2_000_000_000  # one that lives says so more often, from the moment at which it has joined


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
        groups: dict[tuple[int, str, str], list[Recording]] = {}
        for recording in tried:
            rank, world = rendezvous.effective(recording)
            if rank >= 0 and (world > 1 or (world == 1 and _took_the_launchers(recording))):
                groups.setdefault((rank, _place(recording), _attempt(recording)), []).append(recording)
        doubled = [(key, same) for key, claims in groups.items() if len(same := _at_one_time(claims)) > 1]
        if not doubled:
            return
        (rank, *_), same = doubled[0]
        launched = sorted(r.env_rank for r in same if r.env_rank >= 0)
        if (spawned := _spawned_by(run, same)) is not None:
            yield self._two_launchers(rank, same, spawned)
            return
        if rendezvous.effective(same[0])[1] == 1:
            yield self._each_alone(same)
            return
        yield self.finding(
            f"{len(same)} processes ask to be rank {rank}",
            where=same[0].of("rendezvous")[-1].where,
            ranks=launched,
            notes=[f"the launcher started them as {blame.plural(launched)}" if launched else "they were made by the script itself"],
            help='take the rank from the launcher: `rank=int(os.environ["RANK"])`, or call init_process_group without rank',
        )

    def _two_launchers(self, rank: int, same: list[Recording], starts: list[tuple[Recording, Event]]) -> Finding:
        ranks = sorted(parent.env_rank for parent, _ in starts)
        return self.finding(
            f"two launchers are at work: {blame.plural(ranks)}, which the launcher started, each start a world of their own, and {len(same)} "
            f"processes ask to be rank {rank}",
            where=starts[0][1].where,
            ranks=ranks,
            notes=[f"{len(starts)} processes of the launcher run this line", f"their children meet at {_place(same[0])}"],
            help="start a script that makes its own processes with plain `python`; or under torchrun, leave the spawning out and call the training "
            'function once, with `rank=int(os.environ["RANK"])`',
        )


    def _each_alone(self, same: list[Recording]) -> Finding:
        return self.finding(
            f"{len(same)} processes that the script starts all ask to be rank 0 of a world of 1: init_process_group takes the RANK and WORLD_SIZE that "
            "they inherit from the launcher",
            where=same[0].of("rendezvous")[-1].where,
            ranks=[0],
            notes=[f"they meet at {_place(same[0])}; each would train a model of its own"],
            help='tell each its place: `dist.init_process_group("gloo", rank=index, world_size=num_processes)`',
        )


def _took_the_launchers(recording: Recording) -> bool:
    """A process that the script made, and that says no rank of its own."""
    return recording.role == "child" and recording.of("rendezvous")[-1]["asked_rank"] in (None, -1)


def _spawned_by(run: Run, same: list[Recording]) -> list[tuple[Recording, Event]] | None:
    """The launcher's ranks that started these processes, and where; None unless each was started by another one."""
    parents = {r.pid: r for r in run.processes if r.role == "main" and r.env_rank >= 0 and number(r.start.get("world_size"), 1) > 1}
    found: dict[int, tuple[Recording, Event]] = {}
    for child in same:
        parent = parents.get(child.ppid)
        start = next((e for e in parent.of("process_start") if e["child"] == child.pid), None) if parent is not None else None
        if parent is None or start is None or child.role != "child":
            return None
        found[parent.pid] = (parent, start)
    return list(found.values()) if len(found) == len(same) else None


def _at_one_time(claims: list[Recording]) -> list[Recording]:
    """Those that hold the rank while another one does: phases that spawn their processes one after the other follow each other."""
    held = {id(r): (r.of("rendezvous")[-1].t_ns, _left_at(r)) for r in claims}
    return [r for r in claims if any(o is not r and held[id(r)][0] < held[id(o)][1] and held[id(o)][0] < held[id(r)][1] for o in claims)]


def _left_at(recording: Recording) -> float:
    """When it gave its group up or ended; one that was killed in its group, when it was heard of last. Infinite where it did neither."""
    last = worlds.heard_ns(recording) + BEATS_NS if rendezvous.joined(recording) and recording.status is not None else math.inf
    return min((e.t_ns for kind in ("pg_destroy", protocol.END) for e in recording.of(kind)), default=last)


def _attempt(recording: Recording) -> str:
    """Which attempt of torchrun's it belongs to: it ends the whole of one before it begins the next."""
    return str(recording.of("rendezvous")[-1]["attempt"] or "")


def _place(recording: Recording) -> str:
    event = recording.of("rendezvous")[-1]
    method = event["method"]
    return str(method) if method and method != "env://" else f"{event['address']}:{event['port']}"
