"""Where one attempt of a Slurm job writes, and the small files by which its nodes and the controller speak.

    nodes/<K>.jsonl     what the supervisor of agent K tells: a "hello" with facts of its node, then rank, exit and ending (launch/job.py)
    nodes/<K>.pulse     rewritten every second while it lives: which processes of the run there are, and the CPU time of each
    nodes/endpoint      where the agents of several nodes meet; written by agent 0
    nodes/down          says that a rank failed on some node: the others end their ranks too
    control             written by the controller: "stop REASON"

Attempt 0 writes into the run folder itself, attempt K into `attempt-<K>/` in it: what a job left before it was requeued lies elsewhere
and cannot be taken for a result of the new one. All files are rewritten in place and opened anew for each look: a network file system promises
the content at open, while a name that was missing, or was swapped, may be remembered for a minute.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.probe import protocol

NODES_DIR, SLURM_DIR = "nodes", "slurm"
CONTROL, ENDPOINT, DOWN = "control", "endpoint", "down"
MAX_NOTE_BYTES, MAX_LINE_BYTES = 65_536, 1_000_000


def folder_of(run_dir: Path, attempt: int) -> Path:
    return run_dir if attempt == 0 else run_dir / f"attempt-{attempt}"


def make(run_dir: Path, attempt: int) -> Path:
    """The folder of an attempt with all its parts; several nodes may make it at once."""
    folder = folder_of(run_dir, attempt)
    for part in (protocol.REC_DIR, protocol.LOG_DIR, NODES_DIR):
        (folder / part).mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def is_gone(run_dir: Path) -> bool:
    """Whether somebody deleted the folder; a file server that stutters has not."""
    try:
        run_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def newest(run_dir: Path) -> int:
    """The number of the latest attempt that wrote anything."""
    found = [0]
    with contextlib.suppress(OSError):
        for entry in run_dir.iterdir():
            name, _, digits = entry.name.partition("-")
            if name == "attempt" and digits.isdecimal() and entry.is_dir() and not entry.is_symlink():
                found.append(int(digits))
    return max(found)


# ---- notes: one short text in one small file


def write_note(path: Path, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        data = text.encode()
        os.pwrite(descriptor, data, 0)
        os.ftruncate(descriptor, len(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_note(path: Path) -> str:
    """Its text, empty where there is none. Opened with O_CREAT: that asks the file server, not a cache of missing names."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return ""
    try:
        return os.pread(descriptor, MAX_NOTE_BYTES, 0).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def read_json_note(path: Path) -> Mapping[str, Any]:
    """A note that is a JSON object; empty where it is missing or half-written."""
    try:
        value = json.loads(read_note(path) or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# ---- what the nodes tell


class Told:
    """New events of all agents of one attempt since the last look."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / NODES_DIR
        self._at: dict[str, int] = {}

    def events(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """(agent, event); a line that is not whole yet waits for the next look."""
        try:
            names = sorted(entry.name for entry in self._folder.iterdir() if entry.name.endswith(".jsonl"))
        except OSError:
            return
        for name in names:
            agent = name.removesuffix(".jsonl")
            if agent.isdecimal():
                for event in self._new(name):
                    yield int(agent), event

    def _new(self, name: str) -> Iterator[Mapping[str, Any]]:
        at = self._at.get(name, 0)
        try:
            descriptor = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        try:
            chunk = os.pread(descriptor, MAX_LINE_BYTES, at)
        except OSError:
            return
        finally:
            os.close(descriptor)
        whole = chunk[: chunk.rfind(b"\n") + 1]
        self._at[name] = at + len(whole)
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("ev"), str):
                    yield event
