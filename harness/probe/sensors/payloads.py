"""How much the objects weigh that one statement pickles for the other ranks, call by call: a history that is sent whole each time weighs ever more.

Event "payloads" (at the 32nd call of a statement, the 64th, ...): site, op, series [[call, bytes, seconds in these calls so far, seconds by the clock] ...],
held [how many of these calls sent a piece of what the one before had sent, of how many that is known]: what is new each time may grow on purpose.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from .. import sites
from ..patching import after, contained
from ..state import S

OPS = frozenset({"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"})
FIRST_TOLD, MAX_KEPT, MAX_SITES = 32, 64, 16
PIECE, PLACES, MIN_VARIED = 32, (0.25, 0.5, 0.75), 8  # bytes, where they are taken from, different ones among them
_pickled_bytes = [0]  # since the last call was noted
_pickled_last: list[Any] = [None]  # tensor of the last of them
_series: dict[sites.Site, Series] = {}


@dataclass
class Series:
    """Of one statement: evenly spaced calls, at most MAX_KEPT."""

    kept: list[list[float]] = field(default_factory=list)
    num_calls: int = 0
    stride: int = 1
    spent_s: float = 0.0
    pieces: list[bytes] = field(default_factory=list)  # of the last kept call
    held: list[int] = field(default_factory=lambda: [0, 0])

    def add(self, num_bytes: int, took_s: float, pickled: Any = None) -> None:
        self.spent_s += took_s
        if self.num_calls % self.stride == 0:
            self._compare(pickled)
            self.kept.append([self.num_calls, num_bytes, round(self.spent_s, 6), round(time.perf_counter(), 6)])
        self.num_calls += 1
        if len(self.kept) == MAX_KEPT:
            self.kept, self.stride = self.kept[::2], 2 * self.stride

    def _compare(self, pickled: Any) -> None:
        """About 0.1 ms for a MiB, at 64 calls and then ever more rarely."""
        content = pickled.numpy().tobytes() if getattr(pickled, "is_cpu", False) else b""
        if content and self.pieces:
            self.held[0] += any(piece in content for piece in self.pieces)
            self.held[1] += 1
        starts = [int(place * len(content)) for place in PLACES]
        self.pieces = [piece for at in starts if len(set(piece := content[at : at + PIECE])) >= MIN_VARIED]


@contained
def note(op: str, site: sites.Site, took_s: float) -> None:
    """After a call; a rank that only receives pickles nothing."""
    num_bytes, _pickled_bytes[0] = _pickled_bytes[0], 0
    pickled, _pickled_last[0] = _pickled_last[0], None
    if not num_bytes or (site not in _series and len(_series) >= MAX_SITES):
        return
    one = _series.setdefault(site, Series())
    one.add(num_bytes, took_s, pickled)
    if one.num_calls >= FIRST_TOLD and one.num_calls & (one.num_calls - 1) == 0:
        S.recorder.event("payloads", site, op=op, series=one.kept, held=one.held)


def _pickled(result: Any, *args: Any, **kwargs: Any) -> None:
    _pickled_bytes[0] += int(result[0].numel())
    _pickled_last[0] = result[0]


def arm() -> None:
    from torch.distributed import distributed_c10d as c10d

    after(c10d, "_object_to_tensor", _pickled)
