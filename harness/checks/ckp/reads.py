"""Reads and writes of one path by different ranks, with nothing between them that orders them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.checks.ckp import files
from harness.checks.order import Clocks
from harness.record import Event, Run, number


@dataclass(frozen=True)
class Race:
    path: str
    reader: int
    writer: int
    read: Event
    write: Event
    written_ns: int  # when the file was complete, as far as the recording tells
    failed: str  # the reader's error; "" if it read something
    exact: bool = True  # False: of the write only the opening is known

    @property
    def late(self) -> bool:
        """The read began after the file was complete: luck."""
        return not self.failed and self.read.t_ns >= self.written_ns


@dataclass(frozen=True)
class Orphan:
    """A load that found no file, where the rank that would have saved it was ended before."""

    load: files.Load
    writers: tuple[int, ...]
    line: int
    text: str


@dataclass(frozen=True)
class _Write:
    rank: int
    event: Event
    done_ns: int
    atomic: bool
    exact: bool = True


def races(run: Run, clocks: Clocks) -> list[Race]:
    """The pairs, torch.load and plain opens alike; files that the reader writes too are left to the checks of several writers."""
    writes = _writes(run)
    found: list[Race] = []
    for rank, path, event, failed in _reads(run):
        own = any(w.rank == rank for w in writes.get(path, ()))
        for write in () if own else writes.get(path, ()):
            if (
                clocks.same_host(rank, write.rank)
                and clocks.unordered(rank, event, write.rank, write.event)
                and not _waited(run, rank, event, write, failed)
            ):
                found.append(Race(path, rank, write.rank, event, write.event, write.done_ns, failed, write.exact))
                break
    return found


def _writes(run: Run) -> dict[str, list[_Write]]:
    found: dict[str, list[_Write]] = {}
    for save in files.saves(run):
        done = save.end.t_ns if save.end is not None else 1 << 62
        found.setdefault(save.path, []).append(_Write(save.rank, save.begin, done, save.atomic))
    for rank, event in run.events("rename"):
        found.setdefault(str(event["dst"]), []).append(_Write(rank, event, event.t_ns, True))
    for rank, event in run.events("open"):
        if event["mode"] in ("w", "x") and not _guarded(event):
            found.setdefault(str(event["path"]), []).append(_Write(rank, event, event.t_ns, False, False))
    return found


def _guarded(event: Event) -> bool:
    """Opened under a file lock, or the lock itself."""
    return bool(event["locks"]) or str(event["path"]).endswith((".lock", ".lck"))


def _reads(run: Run) -> Iterator[tuple[int, str, Event, str]]:
    for load in files.loads(run):
        if load.path and (load.ok or load.missing or load.broken):
            yield load.rank, load.path, load.begin, load.error.splitlines()[0][:160] if load.error else ""
    loaded = {(load.rank, load.path) for load in files.loads(run)}
    failures = {rank: str(event["message"]) for rank, event in run.events("failure") if event["type"] == "FileNotFoundError"}
    for rank, event in run.events("open"):
        path = str(event["path"])
        if event["mode"] == "r" and (rank, path) not in loaded and not _guarded(event):
            message = failures.get(rank, "")
            failed = message if not event["exists"] and files.name(path) in message else ""
            if event["exists"] or failed:
                yield rank, path, event, failed[:160]


def _waited(run: Run, rank: int, read: Event, write: _Write, failed: str) -> bool:
    """The reader polls (it sleeps in a loop) for what is complete when it appears: a renamed file, or a second one made after it."""
    if failed:
        return False
    reader, writer = run.ranks[rank], run.ranks[write.rank]
    if reader is None or writer is None or read.t_ns < write.done_ns:
        return False
    moment = number(read["y"])
    if not any(number(e["y"]) == moment and e.t_ns <= read.t_ns for e in reader.of("sleep")):
        return False
    later = [e for e in (*writer.of("open"), *writer.of("rename")) if number(e["y"]) == number(write.event["y"]) and e["mode"] != "r"]
    flag = any(write.done_ns < e.t_ns <= read.t_ns and write.event["path"] not in (e["path"], e["src"]) for e in later)
    return write.atomic or flag


def orphans(run: Run) -> list[Orphan]:
    """Loads that failed for want of a file, on some ranks only, in a script that saves to the same expression."""
    loads = files.loads(run)
    missed = [load for load in loads if load.missing and load.end is not None and not load.end["given"] and number(load.begin.step) > 0]
    found: list[Orphan] = []
    for load in missed:
        where = load.begin.where
        others = [r for r, recording in enumerate(run.ranks) if recording is not None and r != load.rank]
        behind = [r for r in others if not any(o.rank == r and o.path == load.path for o in loads)]
        equal = [r for r in others if any(m.rank == r for m in missed)]
        savers = [s for s in (load.end["savers"] if load.end is not None else None) or [] if isinstance(s, dict) and s.get("same")]
        if behind and len(behind) + len(equal) == len(others) and savers and where is not None:
            found.append(Orphan(load, tuple(behind), number(savers[0].get("line")), str(savers[0].get("text") or "")))
    return found
