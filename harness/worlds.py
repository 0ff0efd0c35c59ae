"""Training worlds that a script makes one after the other: sessions, trials of a search, a run on fewer processes.

A rank that joins a second process group in a new process begins a second world. Each is judged for itself: rank 0 of the one is no replica of rank 1 of
the other. Worlds of one size whose times overlap cannot be told apart: then the first process of each rank stands for it. A process that joins several
groups itself belongs to the largest of them, with all that it did in the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from harness.model import Ending, Finding, Outcome, OutcomeKind
from harness.probe import protocol

if TYPE_CHECKING:
    from harness.record import Recording, Run

MAX_WORLDS = 16  # judged; a search of a thousand trials repeats itself
_WEIGHT = (OutcomeKind.DESELECTED, OutcomeKind.NOT_APPLICABLE, OutcomeKind.INCONCLUSIVE, OutcomeKind.RAN, OutcomeKind.CRASHED)


@dataclass
class World:
    """One process group's ranks."""

    size: int
    members: dict[int, Recording] = field(default_factory=dict)  # rank -> its process
    began_ns: int = 0
    ended_ns: int = 0  # when its last member left it, or was heard of last
    over: bool = False  # the script went on behind it: how the run ended says nothing of it

    @property
    def num_steps(self) -> int:
        return max(m.num_steps for m in self.members.values())

    @property
    def launched(self) -> bool:
        """Whether the launcher started its ranks, so that the exit codes and the output are theirs; one that is rank 0 beside its own children counts."""
        return any(m.role == "main" for m in self.members.values())

    def takes(self, rank: int, recording: Recording) -> bool:
        """Whether this process can be one of it: another has its rank, or was gone before this one was there, where it is none."""
        return rank not in self.members and not any(0 < _gone_ns(m) < recording.events[0].t_ns for m in self.members.values())


def split(recordings: Sequence[Recording]) -> list[World]:
    """The worlds of more than one rank; a single one where no rank joined twice, none where nobody joined. Those that the launcher started come first,
    among them the one that trained longest."""
    joined = sorted(_joined(recordings), key=lambda one: one[0])
    by_size: dict[int, list[World]] = {}
    for began_ns, rank, size, recording in joined:
        worlds = by_size.setdefault(size, [])
        if not worlds or not worlds[-1].takes(rank, recording):
            worlds.append(World(size, began_ns=began_ns))
        worlds[-1].members[rank] = recording
        worlds[-1].ended_ns = max(worlds[-1].ended_ns, began_ns, _gone_ns(recording) or heard_ns(recording))
    found = [w for worlds in by_size.values() for w in (worlds if _in_turn(worlds) else [_first_of_each(worlds)])]
    wide = [w for w in found if w.size > 1] or found[:1]
    last_ns = max((w.began_ns for w in wide), default=0)
    for world in wide:
        world.over = not world.launched and world.ended_ns < last_ns
    return sorted(wide, key=lambda w: (not w.launched, -w.num_steps, -len(w.members), w.began_ns))


def chosen(worlds: Sequence[World]) -> list[World]:
    """Those that are judged, the one in which the run ended among them."""
    kept = {id(w) for w in sorted(worlds, key=lambda w: w.over)[:MAX_WORLDS]}
    return [w for w in worlds if id(w) in kept]


def _joined(recordings: Sequence[Recording]) -> list[tuple[int, int, int, Recording]]:
    """(when it first joined it, rank, world size, recording) of every process's largest group."""
    from harness.record import number

    found = []
    for recording in recordings:
        groups = [(number(e["world_size"], -1), e) for e in recording.of(protocol.PROCESS_GROUP) if e["done"]]
        size = max((size for size, _ in groups), default=0)
        if size > 0:
            same = [e for s, e in groups if s == size]
            found.append((same[0].t_ns, number(same[-1]["rank"], -1), size, recording))
    return found


def _gone_ns(recording: Recording) -> int:
    """When it left its last group, or ended; 0 where it did neither."""
    told = recording.of("pg_destroy") or recording.of(protocol.END)
    return told[-1].t_ns if told else 0


def heard_ns(recording: Recording) -> int:
    """When it was there for certain, last: one that trains has nothing to tell for a long time, and one that was killed tells nothing."""
    rows = recording.row(recording.num_rows - 1).t_ns if recording.num_rows else 0
    page = recording.status.time_ns if recording.status is not None else 0
    return max(recording.events[-1].t_ns, rows, page)


def aside(world: World, worlds: Sequence[World], recordings: Sequence[Recording]) -> frozenset[str]:
    """Processes whose failure is none of this world's: other worlds' ranks and their workers, and where it is over, all that are not its own."""
    owners = {m.pid: w for w in worlds for m in w.members.values()}
    found = [(r.stem, owners.get(r.pid) or owners.get(r.ppid)) for r in recordings]
    none = None if world.over else world
    return frozenset(stem for stem, owner in found if (owner or none) is not world)


def judged(run: Run) -> list[Run]:
    """The run and its other worlds, each with the ending that is its own."""
    return [replace(one, ending=_went_on(one.ending)) if one.over and not one.live else one for one in (run, *run.others)]


def _went_on(ending: Ending) -> Ending:
    exits = tuple(replace(e, code=0, by_us=False) for e in ending.exits)
    return Ending(started=ending.started, exits=exits, left_behind=ending.left_behind, wall_s=ending.wall_s)


def _in_turn(worlds: Sequence[World]) -> bool:
    return all(before.ended_ns < after.began_ns for before, after in itertools.pairwise(worlds))


def _first_of_each(worlds: Sequence[World]) -> World:
    """Of worlds that ran side by side, or of ranks that were told one number (LAU114 says so)."""
    first = World(worlds[0].size, began_ns=worlds[0].began_ns, ended_ns=max(w.ended_ns for w in worlds))
    for world in worlds:
        for rank, recording in world.members.items():
            first.members.setdefault(rank, recording)
    return first


def merged(told: Sequence[tuple[Sequence[Outcome], Sequence[Finding]]], num_unjudged: int = 0) -> tuple[list[Outcome], list[Finding]]:
    """Of several worlds' outcomes and findings one of each check, and each fault once, where it is worst: the second world of a script mostly shows
    those of the first."""
    outcomes = [max(each, key=lambda o: _WEIGHT.index(o.kind)) for each in zip(*(outcomes for outcomes, _ in told), strict=True)]
    findings: list[Finding] = []
    for number, (_, found) in enumerate(told):
        known = {(f.code, f.where): f.severity for f in findings}
        new = [f for f in found if f.severity > known.get((f.code, f.where), -1)]
        worse = {(f.code, f.where) for f in new}
        findings = [f for f in findings if (f.code, f.where) not in worse] + [_of_world(f, number, len(told) + num_unjudged) for f in new]
    return outcomes, sorted(findings, key=lambda f: (-f.severity, f.code))


def _of_world(finding: Finding, number: int, total: int) -> Finding:
    """The longest world's as they are."""
    said = f"in another of the {total} process groups that the script makes one after the other"
    return replace(finding, notes=(*finding.notes, said)) if number else finding
