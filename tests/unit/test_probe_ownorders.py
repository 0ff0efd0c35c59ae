"""A shuffle whose seed holds the rank is found where the rank then cuts the same list, and nowhere near."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from harness.probe import cuts, ownorders

MADE = [{"file": "train.py", "line": 9, "func": "main", "text": ""}]
SOURCE = """
class Stream:
    def __init__(self, seed, rank):
        self.seed, self.rank = seed, rank

    def __iter__(self):
{body}


def main(rank):
    run_seed = 7 + rank
    return Stream({seed}, rank)
"""
RANDOM = "rng = random.Random({})\nrng.shuffle(files)\nreturn iter(files[self.rank :: self.world])"


def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seed: str = "7") -> int | None:
    file = tmp_path / "stream.py"
    file.write_text(SOURCE.format(body=textwrap.indent(body, " " * 8), seed=seed))
    spec = importlib.util.spec_from_file_location("stream", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(cuts, "user_files", lambda: [str(file)])
    found = ownorders.told(module.Stream(7, 0), MADE)
    return None if found is None else found["line"]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (RANDOM.format("self.seed + self.rank"), 8),
        ("order = np.random.default_rng(self.seed + self.rank).permutation(n)\nreturn islice(order, self.rank, None, self.world)", 7),
        ("g = torch.Generator()\ng.manual_seed(self.seed + self.rank)\norder = torch.randperm(n, generator=g)\nreturn iter(order[self.rank :: 2])", 9),
    ],
)
def test_at_the_shuffle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, line: int) -> None:
    assert told(tmp_path, monkeypatch, body) == line


def test_where_the_stream_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(tmp_path, monkeypatch, RANDOM.format("self.seed"), "run_seed") == 9


@pytest.mark.parametrize(
    "body",
    [
        RANDOM.format("self.seed"),
        "rng = random.Random(self.seed + self.rank)\nrng.shuffle(pool)\nreturn iter(files[self.rank :: self.world])",  # another list
        "rng = random.Random(self.seed + self.rank)\nrng.shuffle(files)\nreturn iter(files)",  # all of it, in an order of its own
    ],
)
def test_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    assert told(tmp_path, monkeypatch, body) is None
