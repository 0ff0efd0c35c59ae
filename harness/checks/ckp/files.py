"""Checkpoint files as the checks see them: saves under their final name, loads with their outcome."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from harness.record import Event, Recording, Run, number

_BROKEN = re.compile(
    r"PytorchStreamReader|central directory|invalid load key|unexpected EOF|Ran out of input|truncated|corrupted|not a zip|pickle data was"
    r"|storage has wrong|unexpected pos|hit EOF|EOFError|bad pickle|Bad magic",
    re.IGNORECASE,
)
_REFUSED = re.compile(r"Unsupported (global|class|operand|operation|instruction)|Attempting to deserialize object on", re.IGNORECASE)


@dataclass(frozen=True)
class Save:
    """One torch.save of one rank. `path` is the final name: a temporary that is renamed counts under its target."""

    rank: int
    path: str
    written: str  # the name that was opened
    begin: Event
    end: Event | None  # of the rename, where there is one

    @property
    def atomic(self) -> bool:
        return self.path != self.written


@dataclass(frozen=True)
class Load:
    """One torch.load of one rank."""

    rank: int
    path: str
    begin: Event
    end: Event | None

    @property
    def error(self) -> str:
        return str(self.end["error"] or "") if self.end is not None else ""

    @property
    def missing(self) -> bool:
        """There was no such file."""
        return self.end is not None and self.end["error_type"] == "FileNotFoundError"

    @property
    def broken(self) -> bool:
        """The file could not be read to its end."""
        if self.end is None or not self.error or _REFUSED.search(self.error):
            return False
        return self.end["error_type"] in ("EOFError", "BadZipFile") or _BROKEN.search(self.error) is not None

    @property
    def ok(self) -> bool:
        return self.end is not None and not self.error

    @property
    def groups(self) -> Mapping[str, Any]:
        """Top-level entries by what they are: model, optimizer, scheduler, scaler, number."""
        found = self.end["groups"] if self.end is not None else None
        return found if isinstance(found, Mapping) else {}


def _pairs(events: Iterable[Event]) -> list[tuple[Event, Event | None]]:
    """Begin and end of the calls, by path, in order."""
    found: list[tuple[Event, Event | None]] = []
    open_at: dict[str, int] = {}
    for event in events:
        path = str(event["path"] or "")
        if event["done"] or event["error"]:
            if path in open_at:
                at = open_at.pop(path)
                found[at] = (found[at][0], event)
        else:
            open_at[path] = len(found)
            found.append((event, None))
    return found


def saves(run: Run) -> list[Save]:
    """Every save to a path, rank by rank."""
    found: list[Save] = []
    for rank, recording in enumerate(run.ranks):
        if recording is not None:
            found.extend(_saves_of(rank, recording))
    return found


def _saves_of(rank: int, recording: Recording) -> list[Save]:
    found: list[Save] = []
    renames = recording.of("rename")
    for begin, end in _pairs(recording.of("save")):
        path = str(begin["path"] or "")
        if not path or path.startswith("/dev/"):
            continue
        moved = next((r for r in renames if r["src"] == path and r.t_ns >= begin.t_ns), None)
        found.append(Save(rank, str(moved["dst"]) if moved is not None else path, path, begin, moved or end))
    return found


def loads(run: Run) -> list[Load]:
    """Every load, rank by rank; `path` is "" for a buffer."""
    return [
        Load(rank, str(begin["path"] or ""), begin, end)
        for rank, recording in enumerate(run.ranks)
        if recording is not None
        for begin, end in _pairs(recording.of("load"))
    ]


def short(path: str) -> str:
    """The last two parts of a path, for messages."""
    return "/".join(path.rstrip("/").split("/")[-2:]) if path.count("/") > 2 else path


def name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def steps_after(recording: Recording, event: Event) -> int:
    """Optimizer steps that this rank took after an event."""
    return max(0, recording.num_steps - number(event.step))
