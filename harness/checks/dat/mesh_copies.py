"""Copies of parameters that part on the ranks which work on the same samples: they hold shares of one layer (tensor parallelism by DTensor)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from harness.record import Event, Run

APART = 0.05  # of the way that a copy has gone since the first look; what rounding makes is far less
MOST = 1 / 2  # of the copies: the bias of a norm gets a gradient that the team has added up already


def parted(run: Run) -> tuple[int, int, str] | None:
    """Two ranks of one team, and a parameter whose copies were equal before the first step and went ways of their own."""
    told = {r.rank: events for r in run.present if len(events := r.of("shard_copies")) > 1}
    for left, own in told.items():
        mates = {int(m) for members, _ in own[0]["teams"] or () for m in members}  # of all pairs a thousand ranks have half a million
        for right in sorted(m for m in mates & told.keys() if m > left):
            first, last = ([own[at], told[right][at]] for at in (0, -1))
            if first[0]["opt"] == first[1]["opt"] == last[0]["opt"] == last[1]["opt"] and (found := _parted((left, right), first, last)):
                return (left, right, found)
    return None


def _parted(ranks: tuple[int, int], first: Sequence[Event], last: Sequence[Event]) -> str | None:
    teams = [(set(members), bool(whole)) for members, whole in first[0]["teams"] or () if set(ranks) <= set(members)]
    begun, ended = ([_copies(e) for e in events] for events in (first, last))
    names = [n for n in begun[0] if all(n in table for table in (*begun, *ended)) and _are_copies(ranks, begun[0][n], begun[1][n], teams)]
    compared = [n for n in names if begun[0][n][2] == begun[1][n][2] and _way(begun[0][n][2], ended[0][n][2]) > 0]
    apart = [n for n in compared if _way(ended[0][n][2], ended[1][n][2]) > APART * _way(begun[0][n][2], ended[0][n][2])]
    return apart[0] if apart and len(apart) >= MOST * len(compared) else None


def _copies(event: Event) -> dict[str, tuple[list[int], list[int], list[float]]]:
    return {str(name): (mesh, position, values) for name, mesh, position, values in event["copies"] or ()}


def _are_copies(ranks: tuple[int, int], left: Any, right: Any, teams: Sequence[tuple[set[int], bool]]) -> bool:
    """Plain parameters beside shares that are not FSDP's, or the same part in two meshes of one size that have no rank in common."""
    if not left[0] and not right[0]:
        return any(whole for _, whole in teams)
    alike = bool(left[0]) and len(left[0]) == len(right[0]) and left[1] == right[1] and not set(left[0]) & set(right[0])
    return alike and any({*left[0], *right[0]} <= members for members, _ in teams)


def _way(before: Sequence[float], after: Sequence[float]) -> float:
    return math.dist(before, after) if len(before) == len(after) else 0.0
