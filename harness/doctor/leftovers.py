"""Ranks and shared memory of earlier runs. They are named, never touched: whose they are is not for us to decide."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.doctor.line import OK, WARNING, Host, Line
from harness.probe.protocol import ENV_RUN_ID

QUICK = True
WHY = "a rank that outlived its run holds memory, a GPU and a port; segments in /dev/shm stay until the machine restarts"
TORCH_SEGMENT = re.compile(r"torch_(\d+)_")
MARK = f"{ENV_RUN_ID}=".encode()
SHOWN = 5


def look(host: Host) -> Iterable[Line]:
    orphans, segments = list(ranks_without_owner(host)), list(dead_segments(host))
    if not orphans and not segments:
        return [Line("left over", OK, "nothing of an earlier run", WHY)]
    lines = []
    if orphans:
        pids = " ".join(str(pid) for pid, _ in orphans)
        named = "; ".join(f"{pid} ({command})" for pid, command in orphans[:SHOWN])
        lines.append(Line("left over", WARNING, f"{len(orphans)} processes of an earlier run: {named}", WHY, f"if they are yours: kill {pids}"))
    if segments:
        fix = f"if no job of yours runs: rm {' '.join(str(p) for p in segments[:SHOWN])}"
        lines.append(Line("left over", WARNING, f"{len(segments)} segments of processes that are gone: {_names(segments)}", WHY, fix))
    return lines


def _names(segments: list[Path]) -> str:
    return ", ".join(p.name for p in segments[:SHOWN]) + (", ..." if len(segments) > SHOWN else "")


def ranks_without_owner(host: Host) -> Iterator[tuple[int, str]]:
    """(pid, command) of processes of our user that bear the mark of a run and hang below init: their supervisor is gone."""
    table: dict[int, int] = {}
    marked: dict[int, str] = {}
    for entry in os.scandir(host.proc):
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError, IndexError, ValueError):
            if entry.stat().st_uid != os.getuid():
                continue
            state, parent = _bytes(f"{entry.path}/stat").rpartition(b")")[2].split()[:2]
            environ = _bytes(f"{entry.path}/environ") if state not in (b"Z", b"X") else b""
            table[pid] = int(parent)
            if (environ.startswith(MARK) or b"\0" + MARK in environ) and not _is_server(environ):
                marked[pid] = _bytes(f"{entry.path}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()[:80]
    yield from ((pid, command) for pid, command in sorted(marked.items()) if _orphaned(pid, table, marked))


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _is_server(environ: bytes) -> bool:
    """A warm server bears room for a run id instead of one."""
    return MARK + b"---" in environ


def _orphaned(pid: int, table: dict[int, int], marked: dict[int, str]) -> bool:
    """Whether the way up from it ends at init without meeting an unmarked process of ours (its supervisor or shell)."""
    parent = table.get(pid, 1)
    while parent in marked:
        parent = table.get(parent, 1)
    return parent <= 1


def dead_segments(host: Host) -> Iterator[Path]:
    """Segments of our user that torch named after a process that is gone."""
    try:
        entries = sorted(os.scandir(host.shm), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        match = TORCH_SEGMENT.match(entry.name)
        try:
            if match and entry.stat(follow_symlinks=False).st_uid == os.getuid() and not (host.proc / match[1]).exists():
                yield Path(entry.path)
        except OSError:
            continue
