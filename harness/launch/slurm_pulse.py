"""Once a second a node says which processes of the run live on it and how much CPU each used: the controller, elsewhere, cannot look itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path

from harness import attempt, procfs
from harness.launch.proctable import Process

EVERY_S = 1.0


class Pulse:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._count = 0
        self._next = 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def beat(self, members: Iterable[Process]) -> None:
        self._next = time.monotonic() + EVERY_S
        self._count += 1
        living = list(members)
        page = {
            "beat": self._count,
            "t": time.time_ns(),
            "cpu_s": {f"{process.pid}-{process.ticks}": procfs.cpu_s(process.pid) for process in living},
            "gpu": [process.pid for process in living if procfs.holds_gpu(process.pid)],
        }
        attempt.write_note(self._path, json.dumps(page))

