"""Models that share_memory() was called on, with parameters that lie in private memory all the same when the workers start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.checks.shm import workers
from harness.model import Where
from harness.record import Event, Run, number, where_of


@dataclass(frozen=True)
class Half:
    """Private parameters of a shared model, which workers trained and the parent took for trained."""

    team: workers.Team
    kind: str
    names: list[str]
    workers: list[workers.Worker]
    num_shared: int
    where: Where | None  # the start
    asked: Where | None  # share_memory()
    put: Where | None  # the statement that put the first of them in
    use: Where | None
    computed: bool  # not only saved


def _keys(event: Event) -> set[tuple[int, str]]:
    parts = event["parts"]
    return {(number(p[0]), str(p[1])) for p in parts if isinstance(p, list) and len(p) == 2} if isinstance(parts, list) else set()


def read(run: Run) -> list[Half]:
    """One a statement: it may make several models."""
    found: dict[object, Half] = {}
    for half in sorted(_all(run), key=lambda h: (h.computed, len(h.workers)), reverse=True):
        place = half.put or half.asked or half.where
        found.setdefault((place.file, place.line) if place else half.kind, half)
    return list(found.values())


def _all(run: Run) -> Iterator[Half]:
    for team in workers.teams(run):
        moved = [(w, {k for e in w.recording.of("half_trained") for k in _keys(e)}) for w in team.workers if w.recording is not None]
        uses = sorted(team.parent.of("half_used"), key=lambda e: e["how"] != "forward")
        for event in team.parent.of("half_shared"):
            yield from _of(team, event, moved, uses)


def _of(team: workers.Team, event: Event, moved: list[tuple[workers.Worker, set[tuple[int, str]]]], uses: list[Event]) -> Iterator[Half]:
    names = [str(n) for n in event["names"] or ()]
    every = {(number(event["root"]), n) for n in names}
    trained = every & set().union(*(keys for _, keys in moved))
    for use in uses:
        if taken := trained & _keys(use):
            told = [n for n in names if (number(event["root"]), n) in taken]
            puts = [where_of(p) for n, p in zip(names, event["put"] or (), strict=False) if n in told]
            yield Half(
                team, str(event["module"]), told, [w for w, keys in moved if keys & taken], number(event["num_shared"]), event.where,
                where_of(event["asked"]), next((p for p in puts if p is not None), None), use.where, use["how"] == "forward",
            )  # fmt: skip
            return
