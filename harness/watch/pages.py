"""The status pages of a run, read while the ranks rewrite them: a torn page is read again, then the last whole one counts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness import procfs
from harness.probe import protocol
from harness.probe.protocol import Status
from harness.watch import processes

ATTEMPTS = 3
MAX_START_BYTES = 65536


@dataclass(frozen=True)
class Page:
    """One process of the run: who it is, what its page says, whether it lives."""

    stem: str
    pid: int
    ticks: int
    rank: int
    ppid: int
    status: Status
    alive: bool

    @property
    def ended(self) -> bool:
        return self.status.phase == "ended"


class Host(Protocol):
    """Who knows of a process what its page does not say, by the stem of its recording."""

    def look(self) -> None: ...
    def lives(self, stem: str) -> bool: ...
    def cpu_s(self, stem: str) -> float: ...
    def below_cpu_s(self, stem: str) -> float: ...
    def delayed_s(self, stem: str) -> float: ...
    def load_per_core(self) -> float: ...
    def holds_gpu(self, stem: str) -> bool: ...


class ThisHost:
    """/proc of the machine we run on."""

    def look(self) -> None:
        """Each question looks for itself."""

    def lives(self, stem: str) -> bool:
        identity = parse_stem(stem)
        return identity is not None and procfs.lives(*identity)

    def cpu_s(self, stem: str) -> float:
        return procfs.cpu_s(identity[0]) if (identity := parse_stem(stem)) else 0.0

    def below_cpu_s(self, stem: str) -> float:
        """Of the processes below it: one that imports torch has no page of its own yet."""
        return sum(procfs.cpu_s(child.pid) for child in processes.tree(identity[0])) if (identity := parse_stem(stem)) else 0.0

    def delayed_s(self, stem: str) -> float:
        return procfs.delayed_s(identity[0]) if (identity := parse_stem(stem)) else 0.0

    def load_per_core(self) -> float:
        return procfs.load_per_core()

    def holds_gpu(self, stem: str) -> bool:
        return procfs.holds_gpu(identity[0]) if (identity := parse_stem(stem)) else False


class Pages:
    """All pages of one run folder; remembers what does not change."""

    def __init__(self, run_dir: Path, host: Host | None = None) -> None:
        self.host: Host = host or ThisHost()
        self._folder = run_dir / protocol.REC_DIR
        self._who: dict[str, tuple[int, int]] = {}
        self._last: dict[str, Status] = {}

    def read(self) -> list[Page]:
        self.host.look()
        try:
            names = sorted(entry.name for entry in self._folder.iterdir() if entry.name.endswith(".status"))
        except OSError:
            return []
        return [page for name in names if (page := self._page(name.removesuffix(".status")))]

    def _page(self, stem: str) -> Page | None:
        identity = parse_stem(stem)
        status = self._status(stem)
        if identity is None or status is None:
            return None
        if stem not in self._who:
            self._who[stem] = read_start(self._folder / f"{stem}.jsonl")
        rank, ppid = self._who[stem]
        return Page(stem, *identity, rank, ppid, status, self.host.lives(stem))

    def _status(self, stem: str) -> Status | None:
        for _ in range(ATTEMPTS):
            if status := protocol.parse_status(_read(self._folder / f"{stem}.status")):
                self._last[stem] = status
                break
        return self._last.get(stem)


def _read(path: Path) -> bytes:
    """No link is followed: a recording may be forged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, protocol.STATUS_BYTES, 0)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def parse_stem(stem: str) -> tuple[int, int] | None:
    """(pid, start time) from `<node_rank>-<pid>-<start time>`."""
    parts = stem.split("-")
    return (int(parts[1]), int(parts[2])) if len(parts) == 3 and all(part.isdecimal() for part in parts) else None


def read_start(path: Path) -> tuple[int, int]:
    """(rank, parent's pid) as the first event of a recording says; -1 for what it does not say."""
    try:
        with path.open("rb") as events:
            first: Any = json.loads(events.readline(MAX_START_BYTES))
        return int(first.get("rank", -1)), int(first.get("ppid", -1))
    except (OSError, ValueError, TypeError, AttributeError):
        return -1, -1
