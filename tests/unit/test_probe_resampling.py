"""Streams that draw with replacement, and those that take each sample once."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

import pytest

from harness.probe import resampling

SOURCE = """
class Stream:
    def __iter__(self):
{body}

    def unused(self):
        return self.rows[self.rng.randrange(9)]
"""


def told(tmp_path: Path, body: str) -> bool:
    file = tmp_path / "stream.py"
    file.write_text(SOURCE.format(body=textwrap.indent(body, " " * 8)))
    spec = importlib.util.spec_from_file_location("stream", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return resampling.told(module.Stream())


@pytest.mark.parametrize(
    "body",
    [
        "while True:\n    shard = rng.randrange(240)\n    yield from read(9000 + shard)",
        "while True:\n    yield self.rows[rng.randint(0, 9)]",
        "while True:\n    yield from read(random.choice(self.urls))",
        "for i in np.random.choice(len(self.rows), 64):\n    yield self.rows[i]",
        "for i in torch.randint(len(self.rows), (64,)):\n    yield self.rows[i]",
        "for i in torch.multinomial(self.weights, 64, replacement=True):\n    yield self.rows[i]",
        "while True:\n    i = rng.randrange(9)\n    self.seen[i] = 1\n    yield self.rows[i]",  # what is written is another list
        "while True:\n    i = rng.randrange(9)\n    self.cache[i] = read(i)\n    yield self.cache[i]",
    ],
)
def test_with_replacement(tmp_path: Path, body: str) -> None:
    assert told(tmp_path, body) is True


@pytest.mark.parametrize(
    "body",
    [
        "order = list(range(64))\nrandom.shuffle(order)\nfor i in order:\n    yield self.rows[i]",
        "for i in torch.randperm(64).tolist():\n    yield self.rows[i]",
        "for i in random.sample(range(64), 64):\n    yield self.rows[i]",
        "for i in np.random.choice(64, 64, replace=False):\n    yield self.rows[i]",
        "for i in torch.multinomial(self.weights, 64):\n    yield self.rows[i]",
        "for row in self.rows:\n    yield row.roll(1) * torch.randint(0, 2, (1,))",  # augmentation
        "for row in self.rows:\n    slot = rng.randrange(9)\n    pool[slot], out = row, pool[slot]\n    yield out",  # a shuffle buffer
        "while pool:\n    yield pool.pop(rng.randrange(len(pool)))",
        "while pool:\n    i = rng.randrange(len(pool))\n    row = pool[i]\n    del pool[i]\n    yield row",
    ],
)
def test_each_once(tmp_path: Path, body: str) -> None:
    assert told(tmp_path, body) is False
