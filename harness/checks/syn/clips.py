"""The norms by which the ranks clip gradients that are equal at the step they are clipped for."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.checks.opt import losses
from harness.model import Where
from harness.record import Event, Recording, Run
from harness.steps import Step

DENSE = 1024  # steps that all leave a row


@dataclass(frozen=True)
class Differing:
    """One step at which the ranks' norms differ."""

    step: int
    low: float
    high: float
    limit: float
    where: Where | None

    @property
    def clipped(self) -> bool:
        return self.high > self.limit


def differing(run: Run) -> list[Differing]:
    """By the rows, which hold the last norm before a step, where that is of the optimizer that steps; else by what each statement clips."""
    if all(_row_is_its_own(r) for r in run.present):
        return _by_rows(run)
    return sorted((d for key in _statements(run.present[0]) for d in _by_statement(run, key)), key=lambda d: d.step)


def limit(events: Sequence[Event]) -> float:
    """The smallest norm that is clipped to; 0 where some call's is not known."""
    known = [float(e["max_norm"]) for e in events if isinstance(e["max_norm"], (int, float))]
    return min(known) if len(known) == len(events) else 0.0


def _row_is_its_own(recording: Recording) -> bool:
    at, opts = recording.step_index, recording.column("opt")
    last = {e.step: e["opt"] for e in recording.of("clip")}
    return all(not _known(opt) or step not in at or opts[at[step]] == opt for step, opt in last.items())


def _known(opt: object) -> bool:
    return isinstance(opt, int) and opt >= 0


def _by_rows(run: Run) -> list[Differing]:
    told = [e for _, e in run.events("clip")]
    least, first = limit(told), told[0].where if told else None
    return [Differing(s.index, min(n), max(n), least, first) for s in run.steps() if _are_equal(s) and _part(n := s.number("grad_norm"))]


def _are_equal(step: Step) -> bool:
    return step.complete and step.same("grad")


def _part(norms: Sequence[float]) -> bool:
    return losses.all_finite(norms) and max(norms) > min(norms) * (1 + 1e-3) + 1e-12


def _statements(recording: Recording) -> list[Where]:
    return list(dict.fromkeys(e.where for e in recording.of("clip") if e.where is not None))


def _by_statement(run: Run, where: Where) -> list[Differing]:
    """Only while each step leaves a row, and where one optimizer steps what the statement clips."""
    events = [[e for e in r.of("clip") if e.where == where and e.step < DENSE] for r in run.present]
    owners = {e["opt"] for own in events for e in own if _known(e["opt"])}
    if len(owners) != 1:
        return []
    opt = owners.pop()
    tables = [_norms(r, own, opt) for r, own in zip(run.present, events, strict=True)]
    common = set(tables[0]).intersection(*tables[1:])
    least = limit([e for own in events for e in own])
    found = []
    for step in run.steps():
        norms = [t[step.index] for t in tables] if step.index in common else []
        if norms and _are_equal(step) and step.taken("grad") and _part(norms) and least < math.inf:
            found.append(Differing(step.index, min(norms), max(norms), least, where))
    return found


def _norms(recording: Recording, events: Sequence[Event], opt: int) -> Mapping[int, float]:
    """The step of an optimizer that comes next -> the norm."""
    steps = [s for s, o in zip(recording.column("step"), recording.column("opt"), strict=True) if o == opt]
    found: dict[int, float] = {}
    for event in events:
        at = bisect_left(steps, event.step)
        if at < len(steps) and isinstance(event["norm"], (int, float)):
            found[steps[at]] = float(event["norm"])
    return found
