"""Stacks of all ranks on request: a request file that a thread of the probe polls, so it works across nodes and needs no signal."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.model import RankStacks, Where
from harness.probe import protocol
from harness.watch.pages import ThisHost, read_start

WAIT_S = 3.0
REMOTE_WAIT_S = 10.0  # a network file system shows the request, and the answers, late
LOOK_EVERY_S = 0.05
MAX_LINE_BYTES = 4_000_000


def ask(
    run_dir: Path, wait_s: float = WAIT_S, sleep: Callable[[float], None] = time.sleep, lives: Callable[[str], bool] | None = None
) -> tuple[RankStacks, ...]:
    """Asks every process of the run and gathers the answers until all living ones have answered, at most `wait_s`.

    A process that holds the interpreter's lock in native code cannot answer; it is missing in the result.
    """
    recordings = sorted((run_dir / protocol.REC_DIR).glob("*.jsonl"))
    offsets = {path: path.stat().st_size for path in recordings}
    request = _request(run_dir)
    answers: dict[Path, RankStacks] = {}
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        for path in recordings:
            if path not in answers and (event := _answer(path, offsets[path], request)) is not None:
                answers[path] = RankStacks(read_start(path)[0], _threads(path, event))
        if all(path in answers or not (lives or ThisHost().lives)(path.stem) for path in recordings):
            break
        sleep(LOOK_EVERY_S)
    return merge(answers[path] for path in sorted(answers, key=lambda path: answers[path].rank))


def _request(run_dir: Path) -> str:
    """A new number in the request file; readers see the whole of it or the one before."""
    number = str(time.time_ns())
    temporary = run_dir / f".{protocol.STACKS_REQUEST}.{os.getpid()}"
    temporary.write_text(number)
    temporary.replace(run_dir / protocol.STACKS_REQUEST)
    return number


def _answer(path: Path, offset: int, request: str) -> Mapping[str, Any] | None:
    try:
        with path.open("rb") as events:
            events.seek(offset)
            lines = events.read(MAX_LINE_BYTES).split(b"\n")
    except OSError:
        return None
    for line in lines[:-1]:  # the last one may be torn
        if request.encode() in line:
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("k") == protocol.STACKS and event.get("request") == request:
                    return event
    return None


def _threads(path: Path, event: Mapping[str, Any]) -> dict[str, tuple[Where, ...]]:
    """thread -> frames, innermost last; the recording has them innermost first."""
    threads = event.get("threads")
    if not isinstance(threads, dict):
        return {}
    return {str(name): tuple(_wheres(frames))[::-1] for name, frames in threads.items() if isinstance(frames, list)}


def _wheres(frames: list[Any]) -> Iterator[Where]:
    for frame in frames:
        if isinstance(frame, dict) and isinstance(frame.get("line"), int):
            yield Where(str(frame.get("file", "")), frame["line"], str(frame.get("func", "")), str(frame.get("text", "")))


def merge(found: Iterator[RankStacks]) -> tuple[RankStacks, ...]:
    """One entry a rank: threads of a second process of the same rank (mp.spawn) get a number."""
    ranks: dict[int, dict[str, tuple[Where, ...]]] = {}
    for stacks in found:
        threads = ranks.setdefault(stacks.rank, {})
        for name, frames in stacks.threads.items():
            count = sum(1 for known in threads if known == name or known.startswith(f"{name} ("))
            threads[name if not count else f"{name} ({count + 1})"] = frames
    return tuple(RankStacks(rank, threads) for rank, threads in sorted(ranks.items()))
