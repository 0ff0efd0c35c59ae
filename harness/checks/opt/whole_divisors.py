"""Losses that are divided by the number of ranks, or by the batch of all ranks, as the source says and the graph shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from harness.model import Where
from harness.record import Event, Recording, Run, where_of

MIN_BACKWARDS = 4


@dataclass(frozen=True)
class WholeDivisor:
    kind: str  # "ranks" | "batch"
    where: Where | None  # the division
    backward: Where | None
    value: float
    num: int  # backwards of the first rank


def of(run: Run) -> WholeDivisor | None:
    """None where some backward at that call site is another one, or something may make up for it."""
    told = [_whole(r.of("whole_divisor")) for r in run.present]
    if run.world_size < 2 or len(told) < run.world_size or not all(len(own) >= MIN_BACKWARDS for own in told):
        return None
    if any(not e["value"] or e["given"] or e["made_up"] for own in told for e in own):
        return None
    first = told[0][0]
    if any(run.world_size in (_usual_backwards(r), _a_step(own)) for r, own in zip(run.present, told, strict=True)):
        return None  # the mean over as many micro-batches
    if len({(e["kind"], e.where, e["value"]) for own in told for e in own}) != 1:
        return None
    return WholeDivisor(str(first["kind"]), where_of(first["at"]), first.where, float(first["value"]), len(told[0]))


def _usual_backwards(recording: Recording) -> int:
    return Counter(recording.column("num_backward")).most_common(1)[0][0] if recording.num_rows else 0


def _a_step(events: list[Event]) -> int:
    """Backwards of this call site in a step: that of a penalty beside them is no term of the mean."""
    return max(Counter(e.step for e in events).values())


def _whole(events: list[Event]) -> list[Event]:
    """Of a sum over the batch, without the batches that are short: what they are divided by is that of the others."""
    if not events or events[0]["kind"] != "batch":
        return events
    usual = Counter(e["rows"] for e in events).most_common(1)[0][0]
    return [e for e in events if e["rows"] == usual]
