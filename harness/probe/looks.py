"""Places where several sensors look at the same thing, a backward or a step."""

from __future__ import annotations

import math
from typing import Any


class Looks:
    """In the order in which sensors registered. A look that is over is not called any more: even one that returns at once costs 3 us where the step
    before has emptied the caches."""

    def __init__(self) -> None:
        self._all: list[tuple[Any, float]] = []
        self._due: list[Any] = []
        self._from, self._to = 0.0, 0.0  # the steps of which `_due` holds

    def append(self, look: Any, end: float = math.inf) -> None:
        """`end`: the first step of the process at which nothing is looked at any more."""
        self._all.append((look, end))
        self._to = self._from

    def due(self, step: int) -> list[Any]:
        """What looks at this step; a forked child begins at 0 again."""
        if not self._from <= step < self._to:
            self._due = [look for look, end in self._all if step < end]
            self._from, self._to = step, min((end for _, end in self._all if step < end), default=math.inf)
        return self._due
