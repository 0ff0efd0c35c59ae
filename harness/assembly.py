"""Recordings -> `Run`: which process is which rank of which world, and whose steps are aligned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness import solo, worlds
from harness.model import Plan
from harness.record import Recording, Run


def assemble(plan: Plan, recordings: Sequence[Recording], **rest: Any) -> Run:
    """Put recordings into ranks. The training world is the one that init_process_group made; else what the launcher started.

    Processes that the script made itself (mp.spawn) form the world if they made a process group of more than one rank. Of several such worlds the one
    that the launcher started, else the one that trained longest, is the run, and the others are its `others`.
    """
    found = worlds.split(recordings)
    made = worlds.chosen(found)
    grouped, world = (made[0].members, made[0].size) if made else ({}, 0)
    mains = {r.env_rank if r.env_rank >= 0 else 0: r for r in recordings if r.role == "main"}
    spawned = any(r.role == "child" for r in grouped.values())
    if not grouped or not (spawned or world >= len(mains)):
        return _placed(plan, mains, plan.world_size, recordings, **rest)
    table, size = grouped, max(world, max(grouped) + 1)
    if not spawned:
        size = max(size, plan.world_size) if world >= plan.world_size else plan.world_size
        table = {**mains, **{k: v for k, v in grouped.items() if k < size}}
    run = _placed(plan, table, size, recordings, **rest)
    if len(made) == 1:
        return run
    members = {id(r) for one in made for r in one.members.values()}
    beside = [r for r in recordings if id(r) not in members]
    run.others = [_placed(plan, one.members, one.size, [*beside, *one.members.values()], **rest | {"expect": {}}) for one in made[1:]]
    for one, placed in zip(made, (run, *run.others), strict=True):
        placed.over, placed.aside = one.over, worlds.aside(one, made, recordings)
    run.num_unjudged = len(found) - len(made)
    return run


def _placed(plan: Plan, table: Mapping[int, Recording], size: int, recordings: Sequence[Recording], **rest: Any) -> Run:
    ranks: list[Recording | None] = [None] * min(size, 65_536)
    for rank, recording in table.items():
        if 0 <= rank < len(ranks):
            recording.rank = rank
            ranks[rank] = recording
    trimmed = solo.without(ranks)
    changed = {id(old): new for old, new in zip(ranks, trimmed, strict=True) if old is not None and new is not None}
    return Run(plan=plan, ranks=trimmed, processes=[changed.get(id(r), r) for r in recordings], **rest)
