"""Samplers that deal the copies of each sample out among the ranks, and their neighbours."""

from __future__ import annotations

import importlib.util
from itertools import count
from pathlib import Path

import pytest

from harness.probe import repeats, sites

torch = pytest.importorskip("torch")

NUMBERS = count()
SOURCE = """
import numpy as np, torch
import torch.distributed as dist

class Mine:
    def __init__(self, rank, world):
        self.rank, self.world, self.n, self.first = rank, world, 2, 0

    def __iter__(self):
        order = torch.randperm(8).tolist()
{repeated}
        return iter(order[{start}::self.world])
"""


def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: str, start: str = "self.rank", rank: int = 1) -> bool:
    file = tmp_path / f"script{next(NUMBERS)}.py"
    file.write_text(SOURCE.format(repeated="\n".join("        " + line for line in repeated.split("\n")), start=start))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == str(file))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(repeats, "_known", {})
    return repeats.told(module.Mine(rank, 2))


@pytest.mark.parametrize("repeated", [
    "order = [i for i in order for _ in range(self.n)]",
    "order = [order[i // self.n] for i in range(16)]",
    "order = np.repeat(order, self.n)",
    "order = torch.repeat_interleave(torch.tensor(order), self.n)",
    "order = sum(([i] * self.n for i in order), [])",
    "out = []\nfor i in order:\n    for _ in range(self.n):\n        out.append(i)\norder = out",
])  # fmt: skip
def test_copies_are_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: str) -> None:
    assert told(tmp_path, monkeypatch, repeated)
    assert told(tmp_path, monkeypatch, repeated, start="dist.get_rank()")
    assert not told(tmp_path, monkeypatch, repeated, start="self.first")  # which is the rank on rank 0 only
    assert not told(tmp_path, monkeypatch, repeated, start="0")


@pytest.mark.parametrize("repeated", [
    "order = order + order",
    "order = order * self.n",
    "order = [i + 8 * k for i in order for k in range(self.n)]",  # other samples
    "out = []\nfor i in order:\n    for k in range(self.n):\n        out.append(i + k)\norder = out",
    "order = [None] * 8",
])  # fmt: skip
def test_no_copy_stands_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeated: str) -> None:
    assert not told(tmp_path, monkeypatch, repeated)
