"""How much the objects weigh that one statement pickles for the other ranks, call by call: a history that is sent whole each time weighs ever more.

Event "payloads" (at the 32nd call of a statement, the 64th, ...): site, op, series [[call, bytes, seconds in these calls so far, seconds by the clock] ...].
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
_pickled_bytes = [0]  # since the last call was noted
_series: dict[sites.Site, Series] = {}


@dataclass
class Series:
    """Of one statement: evenly spaced calls, at most MAX_KEPT."""

    kept: list[list[float]] = field(default_factory=list)
    num_calls: int = 0
    stride: int = 1
    spent_s: float = 0.0

    def add(self, num_bytes: int, took_s: float) -> None:
        self.spent_s += took_s
        if self.num_calls % self.stride == 0:
            self.kept.append([self.num_calls, num_bytes, round(self.spent_s, 6), round(time.perf_counter(), 6)])
        self.num_calls += 1
        if len(self.kept) == MAX_KEPT:
            self.kept, self.stride = self.kept[::2], 2 * self.stride


@contained
def note(op: str, site: sites.Site, took_s: float) -> None:
    """After a call; a rank that only receives pickles nothing."""
    num_bytes, _pickled_bytes[0] = _pickled_bytes[0], 0
    if not num_bytes or (site not in _series and len(_series) >= MAX_SITES):
        return
    one = _series.setdefault(site, Series())
    one.add(num_bytes, took_s)
    if one.num_calls >= FIRST_TOLD and one.num_calls & (one.num_calls - 1) == 0:
        S.recorder.event("payloads", site, op=op, series=one.kept)


def _pickled(result: Any, *args: Any, **kwargs: Any) -> None:
    _pickled_bytes[0] += int(result[0].numel())


def arm() -> None:
    from torch.distributed import distributed_c10d as c10d

    after(c10d, "_object_to_tensor", _pickled)
