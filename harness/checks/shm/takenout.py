"""Parameters of a shared model that workers took out of shared memory and trained there, while the parent's stayed as they were at the start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.checks.shm import workers
from harness.model import Where
from harness.record import Event, Run, number


@dataclass(frozen=True)
class TakenOut:
    """Some parameters of one model of the parent's."""

    team: workers.Team
    kind: str
    names: list[str]
    num_changed: int  # shared parameters of it that the workers did move
    workers: list[workers.Worker]
    at: Where | None  # the statement in the worker that gave them other memory
    use: Where | None
    computed: bool  # the parent does not only save them


def read(run: Run) -> Iterator[TakenOut]:
    """One a team of workers: the use that computes with them, else one that saves them."""
    for team in workers.teams(run):
        told = [(w, e) for w in team.workers if w.recording is not None for e in w.recording.of("taken_out")]
        uses = sorted(team.parent.of("left_behind"), key=lambda e: e["how"] != "forward")
        for use in uses if told and not team.took_results() else ():
            if found := _of(team, use, told):
                yield found
                break


def _of(team: workers.Team, use: Event, told: list[tuple[workers.Worker, Event]]) -> TakenOut | None:
    left = _parts(use)
    hits = {i: [(name, shape) for name, shape in left if any(_is_part(name, shape, other) for other in _parts(e))] for i, (_, e) in enumerate(told)}
    names = [name for name, shape in left if any((name, shape) in hit for hit in hits.values())]
    if not names:
        return None
    own = [(w, e) for i, (w, e) in enumerate(told) if hits[i]]
    at = next((e.where for _, e in own if e.where is not None), None)
    team_of = list({id(w): w for w, _ in own}.values())
    return TakenOut(team, str(use["module"]), names, number(use["num_changed"]), team_of, at, use.where, use["how"] == "forward")


def _parts(event: Event) -> list[tuple[str, list[int]]]:
    return [(str(n), list(s)) for n, s in zip(event["names"] or (), event["shapes"] or (), strict=False)]


def _is_part(name: str, shape: list[int], other: tuple[str, list[int]]) -> bool:
    """A worker may hold the model inside of another one."""
    return shape == other[1] and (other[0] == name or other[0].endswith(f".{name}"))
