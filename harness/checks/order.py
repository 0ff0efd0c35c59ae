"""Whether something orders two events of two ranks. A collective does: both sides have passed the same number of them, or they have not.

`y` of an event counts the collectives, reducing backwards and wraps so far. init_process_group synchronises too, and sends and receives
order two ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

from harness.probe.protocol import POINT_TO_POINT
from harness.record import Event, Recording, Run, number


class Clock:
    """Synchronisations of one rank."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.host = str(recording.start.get("host") or "")

    @cached_property
    def _joins(self) -> list[int]:
        return sorted(e.t_ns for e in self.recording.of("pg") if e["done"])

    @cached_property
    def _messages(self) -> list[Event]:
        return [e for e in self.recording.of("coll") if e["op"] in POINT_TO_POINT]

    def at(self, event: Event) -> int:
        """How many synchronisations lie before this event."""
        return number(event["y"]) + bisect_right(self._joins, event.t_ns)

    def messages_at(self, moment: int) -> bool:
        return any(self.at(e) == moment for e in self._messages)


class Clocks:
    """The clocks of all ranks of a run."""

    def __init__(self, run: Run) -> None:
        self.of = {rank: Clock(recording) for rank, recording in enumerate(run.ranks) if recording is not None}
        self.reliable = _reliable(run, self.of)

    def at(self, rank: int, event: Event) -> int:
        return self.of[rank].at(event)

    def same_host(self, a: int, b: int) -> bool:
        """On one machine a path is one file; two nodes may each have their own."""
        return self.of[a].host == self.of[b].host

    def unordered(self, a: int, one: Event, b: int, other: Event) -> bool:
        """Nothing lies between the two events that would make one rank wait for the other."""
        moment = self.at(a, one)
        return moment == self.at(b, other) and not self.of[a].messages_at(moment) and not self.of[b].messages_at(moment)


def _reliable(run: Run, clocks: dict[int, Clock]) -> bool:
    """Counts can be compared only where all ranks have counted the same in the end; a rank that died early has counted less."""
    ends = {clocks[rank].at(event) for rank, event in run.events("end")}
    return not run.finished or len(ends) <= 1
