"""Training worlds that a script makes one after the other: sessions, trials of a search, a run on fewer processes.

A rank that joins a second process group in a new process begins a second world. Each is judged for itself: rank 0 of the one is no replica of rank 1 of
the other. Worlds of one size whose times overlap cannot be told apart: then the first process of each rank stands for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.model import Finding, Outcome, OutcomeKind
from harness.probe import protocol

if TYPE_CHECKING:
    from harness.record import Recording

MAX_WORLDS = 16  # judged; a search of a thousand trials repeats itself
_WEIGHT = (OutcomeKind.DESELECTED, OutcomeKind.NOT_APPLICABLE, OutcomeKind.INCONCLUSIVE, OutcomeKind.RAN, OutcomeKind.CRASHED)


@dataclass
class World:
    """One process group's ranks."""

    size: int
    members: dict[int, Recording] = field(default_factory=dict)  # rank -> its process
    began_ns: int = 0
    ended_ns: int = 0  # when its last member left it, or was heard of last

    @property
    def num_steps(self) -> int:
        return max(m.num_steps for m in self.members.values())


def split(recordings: Sequence[Recording]) -> list[World]:
    """The worlds of more than one rank, the one that trained longest first; a single one where no rank joined twice, none where nobody joined."""
    joined = sorted(_joined(recordings), key=lambda one: one[0])
    by_size: dict[int, list[World]] = {}
    for began_ns, rank, size, recording in joined:
        worlds = by_size.setdefault(size, [])
        if not worlds or rank in worlds[-1].members:
            worlds.append(World(size, began_ns=began_ns))
        worlds[-1].members[rank] = recording
        worlds[-1].ended_ns = max(worlds[-1].ended_ns, began_ns, _left_ns(recording))
    found = [w for worlds in by_size.values() for w in (worlds if _in_turn(worlds) else [_first_of_each(worlds)])]
    wide = [w for w in found if w.size > 1] or found[:1]
    return sorted(wide, key=lambda w: (-len(w.members), -w.num_steps, w.began_ns))[:MAX_WORLDS]


def _joined(recordings: Sequence[Recording]) -> list[tuple[int, int, int, Recording]]:
    """(time, rank, world size, recording) of every process's last group."""
    from harness.record import number

    found = []
    for recording in recordings:
        groups = [e for e in recording.of(protocol.PROCESS_GROUP) if e["done"] and number(e["world_size"], -1) > 0]
        if groups:
            found.append((groups[-1].t_ns, number(groups[-1]["rank"], -1), number(groups[-1]["world_size"], -1), recording))
    return found


def _left_ns(recording: Recording) -> int:
    left = recording.of("pg_destroy")
    return left[-1].t_ns if left else recording.events[-1].t_ns


def _in_turn(worlds: Sequence[World]) -> bool:
    return all(before.ended_ns < after.began_ns for before, after in itertools.pairwise(worlds))


def _first_of_each(worlds: Sequence[World]) -> World:
    """Of worlds that ran side by side, or of ranks that were told one number (LAU114 says so)."""
    first = World(worlds[0].size, began_ns=worlds[0].began_ns, ended_ns=max(w.ended_ns for w in worlds))
    for world in worlds:
        for rank, recording in world.members.items():
            first.members.setdefault(rank, recording)
    return first


def merged(told: Sequence[tuple[Sequence[Outcome], Sequence[Finding]]]) -> tuple[list[Outcome], list[Finding]]:
    """Of several worlds' outcomes and findings one of each check, and each fault once: the second world of a script mostly shows those of the first."""
    outcomes = [max(each, key=lambda o: _WEIGHT.index(o.kind)) for each in zip(*(outcomes for outcomes, _ in told), strict=True)]
    findings: list[Finding] = []
    for number, (_, found) in enumerate(told):
        known = {(f.code, f.where) for f in findings}
        findings += [_of_world(f, number, len(told)) for f in found if (f.code, f.where) not in known]
    return outcomes, sorted(findings, key=lambda f: (-f.severity, f.code))


def _of_world(finding: Finding, number: int, total: int) -> Finding:
    """The longest world's as they are."""
    said = f"in another of the {total} process groups that the script makes one after the other"
    return replace(finding, notes=(*finding.notes, said)) if number else finding
