"""`rank + worker.id` is found where a stream adds the two, and nowhere near."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from harness.probe import readersums

SOURCE = """
class Stream:
    def __iter__(self):
        info = get_worker_info()
        me = {expression}
        return iter(self.order[me :: self.readers])
"""


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ("self.rank + info.id", True),
        ("worker_id + dist.get_rank()", True),
        ("self.rank * info.num_workers + info.id", False),
        ("self.rank + self.world * info.id", False),
        ("self.rank + 1", False),
        ("self.offset + info.id", False),
    ],
)
def test_sums(tmp_path: Path, expression: str, found: bool) -> None:
    file = tmp_path / "stream.py"
    file.write_text(SOURCE.format(expression=expression))
    spec = importlib.util.spec_from_file_location("stream", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = readersums.told(module.Stream())
    assert (told is not None) == found and (told is None or told["line"] == 5)
    stride = readersums.stride(module.Stream())
    assert stride is not None and stride["line"] == 6
