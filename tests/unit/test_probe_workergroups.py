"""Where a stream asks for its rank in workers that have no process group."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import workergroups

SOURCE = """
class Stream:
    def __init__(self):
        self.world = dist.get_world_size()

    def mine(self):
        rank, world = 0, 1
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        return self.order[rank::world]

    def __iter__(self):
        return iter({read})
"""


def dataset(folder: Path, read: str) -> Any:
    file = folder / "stream.py"
    file.write_text(SOURCE.format(read=read))
    spec = importlib.util.spec_from_file_location("stream", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return object.__new__(module.Stream)


@pytest.mark.parametrize(
    ("read", "method", "workers", "line"),
    [
        ("self.mine()", "spawn", 1, 8),
        ("self.mine()", "forkserver", 2, 8),
        ("self.order[get_rank()::2]", "spawn", 1, 13),
        ("self.mine()", "fork", 1, None),  # a fork has its rank's group
        ("self.mine()", "spawn", 0, None),
        ("self.order[self.rank::self.world]", "spawn", 1, None),
    ],
)
def test_the_line(tmp_path: Path, read: str, method: str, workers: int, line: int | None) -> None:
    loader = SimpleNamespace(num_workers=workers, multiprocessing_context=multiprocessing.get_context(method), dataset=dataset(tmp_path, read))
    told = workergroups.told(loader)
    assert (told["line"] if told else None) == line


def test_the_default_way_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = SimpleNamespace(num_workers=1, multiprocessing_context=None, dataset=dataset(tmp_path, "self.mine()"))
    for method, found in (("fork", False), ("spawn", True)):
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False, method=method: method)
        assert (workergroups.told(loader) is not None) == found
