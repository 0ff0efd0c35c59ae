"""Places where several sensors look at the same thing, a backward or a step."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

_ALWAYS = (None,)


class Looks:
    """In the order in which sensors registered. A look that has nothing to do is not called: even one that returns at once costs 3 us where the step
    before has emptied the caches."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, float, Sized]] = []
        self._now: list[tuple[Any, Sized]] = []
        self._from, self._to = 0.0, 0.0  # the steps of which `_now` holds

    def append(self, look: Any, end: float = math.inf, when: Sized = _ALWAYS) -> None:
        """`end`: the first step of the process at which nothing is looked at any more. `when`: what the look works on, nothing to do while it is empty."""
        self._all.append((look, end, when))
        self._to = self._from

    def due(self, step: int) -> list[Any]:
        """What looks at this step; a forked child begins at 0 again."""
        if not self._from <= step < self._to:
            self._now = [(look, when) for look, end, when in self._all if step < end]
            self._from, self._to = step, min((end for _, end, _ in self._all if step < end), default=math.inf)
        return [look for look, when in self._now if when]
