"""Stacks on request, with a writer that plays the probe's thread."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.model import RankStacks, Where
from harness.probe import protocol
from harness.watch import stacks


def site(line: int) -> dict[str, Any]:
    return {"file": "train.py", "line": line, "func": "main", "text": "x = 1"}


def recording(folder: Path, rank: int, pid: int) -> Path:
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    (folder / protocol.REC_DIR).mkdir(exist_ok=True)
    path = folder / protocol.REC_DIR / f"0-{pid}-{ticks}.jsonl"
    path.write_text(json.dumps({"k": "start", "rank": rank, "ppid": 1}) + "\n")
    return path


def answer(folder: Path, path: Path, threads: Any, request: str | None = None) -> None:
    asked = request or (folder / protocol.STACKS_REQUEST).read_text()
    with path.open("a") as events:
        events.write(json.dumps({"k": "stacks", "request": asked, "threads": threads}) + "\n")


def once(act: Callable[[], None]) -> Callable[[float], None]:
    """A sleep during which the ranks act, once."""
    acts = [act]
    return lambda _: acts.pop()() if acts else None


def test_answers_are_gathered_until_all_living_processes_have_answered(tmp_path: Path) -> None:
    mine, dead = recording(tmp_path, 1, os.getpid()), recording(tmp_path, 0, 2**22 + 1)
    answer(tmp_path, mine, {"MainThread": [site(1)]}, request="1")  # an older request
    frames = {"MainThread": [site(9), site(4)], "odd": "text", "pin": [{"file": "x"}, site(3)]}
    found = stacks.ask(tmp_path, 60.0, once(lambda: answer(tmp_path, mine, frames)))
    inner, outer = Where("train.py", 9, "main", "x = 1"), Where("train.py", 4, "main", "x = 1")
    assert found == (RankStacks(1, {"MainThread": (outer, inner), "pin": (Where("train.py", 3, "main", "x = 1"),)}),)
    assert dead.exists()


def test_a_process_that_does_not_answer_is_missing(tmp_path: Path) -> None:
    recording(tmp_path, 0, os.getpid())
    assert stacks.ask(tmp_path, 0.2) == ()


def test_two_processes_of_one_rank_are_told_apart(tmp_path: Path) -> None:
    frame = (Where("a.py", 1),)
    merged = stacks.merge(
        iter([RankStacks(0, {"MainThread": frame}), RankStacks(0, {"MainThread": frame}), RankStacks(1, {"MainThread": frame})])
    )
    assert merged == (RankStacks(0, {"MainThread": frame, "MainThread (2)": frame}), RankStacks(1, {"MainThread": frame}))
