"""Where a thing was made and how a loop can be left, read from source files written for the purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from harness.probe import origins

SOURCE = """
looked = []
class DataLoader:
    def __init__(self, dataset, batch_size=1, sampler=None, generator=None):
        looked.extend(look(sys._getframe(1)))
def split(data):
    return data, data
def main(options):
    data = list({"a", "b"})
    train, held = split(data)
    sampler: object = object()
    loader = DataLoader(
        train,
        sampler=sampler,
        generator=object(),
    )
    for epoch in range(3):
        for batch in []:
            if batch is None:
                continue
            if batch:
                break
        while options.wait:
            if epoch:
                return
        if epoch > 1: break
    return loader
"""


@pytest.fixture
def module(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    space: dict[str, Any] = {"sys": sys, "path": str(path), "look": look}
    exec(compile(SOURCE, str(path), "exec"), space)
    return space


class Options:
    wait = False


def look(frame: FrameType) -> list[list[int]]:
    """While the call runs: its arguments' lines."""
    asked = [("dataset", 0), ("sampler", 3), ("generator", -1), ("batch_sampler", 9)]
    return [[line for _, line, _ in origins.argument(frame, keyword, position)] for keyword, position in asked]


def test_arguments_are_followed_to_their_origin(module: dict[str, Any]) -> None:
    module["main"](Options())
    dataset, sampler, generator, batch_sampler = module["looked"]
    assert dataset == [10, 9]  # the split, and what was split
    assert sampler == [11]
    assert generator == [15]  # written out in the call itself
    assert batch_sampler == []


def test_ways_out_of_loops(module: dict[str, Any]) -> None:
    told = origins.loops([(module["path"], 18, "main")])
    assert [(r["first"], r["last"], r["level"]) for r in told["ranges"]] == [(18, 22, 0), (17, 26, 1)]
    assert [(e["site"]["line"], e["kind"], e["level"]) for e in told["exits"]] == [
        (19, "continue", 0), (21, "break", 0), (24, "return", 1), (26, "break", 1),
    ]  # fmt: skip


def test_a_condition_of_while_is_a_way_out(module: dict[str, Any]) -> None:
    told = origins.loops([(module["path"], 24, "main")])
    assert [(e["site"]["line"], e["kind"]) for e in told["exits"] if e["level"] == 0] == [(23, "while"), (24, "return")]


def test_source_that_is_not_there() -> None:
    assert origins.loops([("/nowhere/train.py", 3, "main")]) == {"exits": [], "ranges": [], "result": None}


def test_what_becomes_of_a_sum(tmp_path: Path) -> None:
    path = tmp_path / "evaluate.py"
    body = ["for x in xs:", "    pass", "log(1)", "mean = total / 3", "for epoch in epochs:", "    set_epoch(epoch)"]
    path.write_text("def f(xs, epochs):\n" + "".join(f"    {line}\n" for line in body))
    assert origins.result_after((str(path), 2, "f")) == (str(path), 5, "f")
    assert origins.result_after((str(path), 6, "f")) is None
    caller = (str(path), 99, "main")
    assert origins.epoch_origin([(str(path), 7, "f"), caller]) == caller  # the loop runs over what the caller gave
