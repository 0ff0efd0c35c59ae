"""Batches that are made by hand and whose targets are equal on all ranks, though the inputs differ: the same samples, each rank with noise or an
augmentation of its own."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks.dat import noise, passes
from harness.model import Where
from harness.record import Event, Run, number, where_of

MIN_TARGETS, MIN_NUMEL, MIN_DRAWN = 8, 16, 3


@dataclass(frozen=True)
class SameTargets:
    """Targets of the first backwards, compared one by one."""

    num: int
    different: int  # among them
    where: Where | None


def find(run: Run) -> SameTargets | None:
    """None where they differ, where they hardly change from step to step, hold but a few different numbers, or may be drawn noise themselves."""
    told = [r.of("loss_targets")[:1] for r in run.present]
    if len(told) < 2 or not all(told):
        return None
    events = [e[0] for e in told]
    columns = [passes.unpack(e["digests"]) for e in events]
    num = min(map(len, columns))
    if num < MIN_TARGETS or any(not e["varied"] or number(e["numel"]) < MIN_NUMEL for e in events):
        return None
    if any(e["noise"] is True for e in events) or _drawn(run, max(number(e["numel"]) for e in events)):
        return None
    first = columns[0][:num]
    if 0 in first or any(c[:num] != first for c in columns) or 2 * len(set(first)) < num:
        return None
    return SameTargets(num, len(set(first)), _shared_out(events[0]))


def _drawn(run: Run, numel: int) -> bool:
    """The ranks draw as much equal noise at (nearly) every step: it may be what a denoiser has to find, for samples that differ."""
    drawn = [s for s in noise.sources(run) if len(s.steps) >= MIN_DRAWN and s.first["whole"] and number(s.first["numel"]) >= numel]
    return any(s.equal_steps >= 0.9 * len(s.steps) and not s.constant for s in drawn)


def _shared_out(event: Event) -> Where | None:
    """The one statement that takes something by the rank, where there is but one."""
    found = event["shares"] or []
    return where_of(found[0]) if len(found) == 1 else None
