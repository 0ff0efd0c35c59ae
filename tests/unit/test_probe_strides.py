"""Strides that part samples among the ranks: told where the stride is known and is not the world size, for none of their healthy neighbours."""

from __future__ import annotations

import importlib.util
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from harness.probe import cuts, sites, strides

torch = pytest.importorskip("torch")

NUMBERS = count()  # a file is parsed once: each has a name of its own

HEAD = """
import os
from itertools import islice
import torch
import torch.distributed as dist

class Stream(torch.utils.data.IterableDataset):
    def __init__(self, files, rank=0, world=2, workers=2, worker=1):
        self.rank = rank
        {line}

    def __iter__(self):
        return iter(self.files)
"""
TAIL = """
def main(world, group, args):
    rank = dist.get_rank()
    return Stream(list(range(16)), rank, world)
"""


def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, tail: str = TAIL, devices: int = 0, world: int = 2) -> dict[str, Any] | None:
    file = tmp_path / f"script{next(NUMBERS)}.py"
    file.write_text(HEAD.format(line=line) + tail)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(cuts, "user_files", lambda: [str(file)])
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == str(file))
    monkeypatch.setattr(strides, "_world_size", lambda: world)
    monkeypatch.setattr(strides, "_devices", lambda: devices)
    return strides.told(object.__new__(module.Stream), [])


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("self.files = files[rank :: max(1, torch.cuda.device_count())]", 1),
        ("self.files = files[rank::4]", 4),
        ("self.files = list(islice(files, self.rank, None, 3))", 3),
        ("n = torch.cuda.device_count() if torch.cuda.is_available() else 1; self.files = files[rank::n]", 1),
        ("self.files = [f for i, f in enumerate(files) if i % 4 == rank]", 4),
        ("self.files = files[int(os.environ['RANK'])::3]", 3),
    ],
)
def test_another_stride(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, step: int) -> None:
    found = told(tmp_path, monkeypatch, line)
    assert found is not None and found["step"] == step and found["site"]["line"] == 10


@pytest.mark.parametrize(
    "line",
    [
        "self.files = files[rank::world]",
        "self.files = files[rank :: dist.get_world_size()]",
        "self.files = files[rank::2]",
        "self.files = list(islice(files, rank * workers + worker, None, world * workers))",
        "self.files = files[rank % 4 :: 4]",
        "self.files = files[worker::4]",
        "self.files = files[rank:]",
        "self.files = files[rank::1]",
        "self.files = files[dist.get_rank(world)::4]",
        "self.files = files[rank :: int(os.environ['STRIDE'])]",
        "self.files = files[0::4]",
    ],
)
def test_shares_that_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert told(tmp_path, monkeypatch, line) is None


@pytest.mark.parametrize(
    "rank",
    ["dist.get_rank(group)", "dist.get_rank() // 2", "args.rank", "dist.get_rank() % 4", "int(os.environ['LOCAL_RANK'])"],
)
def test_a_rank_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    assert told(tmp_path, monkeypatch, "self.files = files[rank::4]", TAIL.replace("dist.get_rank()", rank)) is None


def test_as_many_devices_as_ranks_and_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "self.files = files[rank :: max(1, torch.cuda.device_count())]"
    assert told(tmp_path, monkeypatch, line, devices=2) is None
    assert told(tmp_path, monkeypatch, line, world=1) is None
    assert told(tmp_path, monkeypatch, line, TAIL + "\ndef again():\n    return Stream([1], 3)\n") is None
