"""What the ranks drew at random in their training code, aligned by call site and step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.checks.dat.passes import MAX_COMPARED
from harness.model import Where
from harness.record import Event, Run, number

Site = tuple[str, int, str, bool]  # file, line, function drawn, inside a loader's fetch


@dataclass(frozen=True)
class Source:
    """One statement that drew on every rank: step -> the event of each rank."""

    site: Site
    steps: Mapping[int, tuple[Event, ...]]

    @property
    def where(self) -> Where | None:
        return next(iter(self.steps.values()))[0].where

    @property
    def first(self) -> Event:
        return next(iter(self.steps.values()))[0]

    @property
    def equal_steps(self) -> int:
        return sum(1 for events in self.steps.values() if len({repr((e["digest"], e["num"])) for e in events}) == 1)

    @property
    def constant(self) -> bool:
        return len({repr(events[0]["digest"]) for events in self.steps.values()}) < 2


def sources(run: Run) -> list[Source]:
    """Statements that drew with gradients on, at the same steps on all ranks that reported."""
    tables: list[dict[Site, dict[int, Event]]] = []
    for recording in run.present[:MAX_COMPARED]:
        table: dict[Site, dict[int, Event]] = {}
        for event in recording.of("draw"):
            at = event.where
            if at is not None and event["grad"]:
                site = (at.file.rpartition("/")[-1], at.line, str(event["fn"]), bool(event["data"]))
                table.setdefault(site, {}).setdefault(number(event["at"]), event)
        tables.append(table)
    found = []
    for site, first in (tables[0] if tables else {}).items():
        steps = {at: tuple(t[site][at] for t in tables) for at in first if all(at in t.get(site, {}) for t in tables)}
        if steps:
            found.append(Source(site, steps))
    return found


def seeded_at(run: Run, before_ns: int, what: str = "torch") -> Where | None:
    """The statement that seeded a global generator last before a time, if it gave the same seed on all ranks."""
    lasts = []
    for recording in run.present:
        events = [e for e in recording.of("seed") if e["what"] == what and e.t_ns < before_ns]
        if not events:
            return None
        lasts.append(events[-1])
    return lasts[0].where if len({repr(e["value"]) for e in lasts}) == 1 else None
