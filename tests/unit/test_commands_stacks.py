"""`harness stacks`: what is told of ranks that wait, compute, ended or do not answer."""

from __future__ import annotations

from harness.commands import _standing
from harness.model import RankStacks, Where
from harness.watch.progress import Moment
from harness.watch.standing import combine

THREADS = {"MainThread": (Where("/home/u/train.py", 88, "main", "dist.all_reduce(x)"), Where("/v/lib/python3.11/site-packages/torch/d.py", 9, "all_reduce"))}
PROBE = Where("/opt/harness/probe/patching.py", 60, "wrapper")


def moment(rank: int, op: str = "", site: str = "", alive: bool = True) -> Moment:
    return Moment(rank, 100 + rank, 7, "train", op, site, 3.0, alive)


def test_ranks_at_one_place_are_told_together() -> None:
    waiting = [moment(rank, "all_reduce", "/home/u/train.py:88:main") for rank in (0, 2, 3)]
    found = combine([*waiting, moment(1)], {1: RankStacks(1, {"MainThread": (Where("/home/u/train.py", 61, "sleep"), PROBE)})})
    shown = _standing.text(found, "/home/u")
    assert shown.splitlines()[:2] == ["ranks 0,2-3: in all_reduce at train.py:88", "rank 1: in its own code at train.py:61"]
    assert "rank 1 (pid 101), is in its own code at train.py:61, 3.0 s after its last call that can wait, step 7" in shown
    assert "patching.py" not in shown
    assert shown.count("no answer") == 3


def test_threads_are_shown_innermost_last_and_an_ended_rank_has_none() -> None:
    found = combine([moment(0, "all_reduce", "/home/u/train.py:88:main"), moment(1, alive=False)], {0: RankStacks(0, THREADS)})
    lines = _standing.text(found, "/home/u").splitlines()
    assert "    train.py:88 in main: dist.all_reduce(x)" in lines
    assert lines[1] == "rank 1: has ended" and not any(line.startswith("rank 1 (") for line in lines)


def test_foreign_text_cannot_paint_the_terminal() -> None:
    evil = {"\x1b[2JMain": (Where("/t\x1b[31m.py", 1, "f\nverdict     sane", "x\r\x1b[1A"),)}
    shown = _standing.text(combine([moment(0, "op\x1b[5m")], {0: RankStacks(0, evil)}), "")
    assert "\x1b" not in shown and "\r" not in shown and "\nverdict" not in shown


def test_nothing_yet() -> None:
    assert _standing.text([], "") == "no rank has shown itself yet"
