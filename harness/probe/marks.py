"""The optimizers that are alive, and what is remembered of each between its steps. Found by id, 0.2 us; a WeakSet takes 3 us to walk."""

from __future__ import annotations

import weakref
from typing import Any


class Mark:
    """What is remembered of an optimizer between its steps."""

    __slots__ = ("added", "cleared", "graded", "held", "num_modules", "num_steps", "on_device", "optimizer", "stepped", "versions", "zeroed")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.versions: dict[int, int] = {}  # of gradients on a device, after the last backward or before the last step
        self.zeroed = False
        self.cleared = False  # zero_grad() took its gradients away, and no backward or step has come since
        self.graded: set[int] = set()  # ids of parameters that had a gradient after a backward since the last step (first steps only)
        self.stepped = False
        self.num_steps = 0
        self.held: list[Any] = []  # of a parameter whose gradient is not zero before this backward: (weak reference, id and version of the gradient)
        self.added = False  # a backward added to a gradient that was not zero
        self.num_modules = 0  # made before it
        self.on_device = False  # as it was when somebody last looked: at every step with digests


table: dict[int, Mark] = {}  # by id of a living optimizer, in order of construction


def of(optimizer: Any) -> Mark:
    found = table.get(id(optimizer))
    if found is None:
        found = table[id(optimizer)] = Mark(optimizer)
        weakref.finalize(optimizer, table.pop, id(optimizer), None).atexit = False
    return found


def optimizers() -> list[Any]:
    """Those alive, in order of construction."""
    return [optimizer for m in list(table.values()) if (optimizer := m.optimizer()) is not None]
