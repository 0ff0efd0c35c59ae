"""Scaling by the mean and deviation of the rank's own cut: read from the source, for none of its healthy neighbours."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from harness.probe import standardising, syntax

NUMBERS = count()  # a file is parsed once: each has a name of its own
START = """
import torch
import torch.distributed as dist
rank, world = dist.get_rank(), dist.get_world_size()
rows = load()
"""


def found(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / f"script{next(NUMBERS)}.py"
    file.write_text(START + text)
    tree = syntax.tree(str(file))
    assert tree is not None
    lines = file.read_text().splitlines()
    return [lines[s.made[1] - 1].strip() for s in standardising.of_own_cuts(((str(file), tree),))]


CLASS = """
class Part(torch.utils.data.Dataset):
    def __init__(self, paths):
        self.x = torch.cat([read(p) for p in paths])
        self.mean = self.x.mean(0)
        self.std = self.x.std(0)

    def __getitem__(self, i):
        return (self.x[i] - self.mean) / (self.std + 1e-8)

def main(r, n):
    data = Part(sorted(glob("part_*.csv"))[r::n])

main(rank, world)
"""
SPAWNED = """
def load(rank, world):
    n = len(rows) // world
    lo = rank * n
    x = rows[lo:lo + n]
    x -= x.mean(axis=0)
    x /= x.std(axis=0)
    return x

def worker(rank, world):
    train(load(rank, world))

torch.multiprocessing.spawn(worker, args=(2,), nprocs=2)
"""
LOADER = """
from torch.utils.data import DataLoader, DistributedSampler
loader = DataLoader(rows, sampler=DistributedSampler(rows))
total, square, n = 0, 0, 0
for x, _ in loader:
    total += x.sum(0)
    square += x.square().sum(0)
    n += len(x)
mean = total / n
std = (square / n - mean ** 2).sqrt()
for x, y in loader:
    out = model((x - mean) / std)
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("mine = rows[rank::world]\nmean, std = mine.mean(0), mine.std(0)\nmine = (mine - mean) / std\n", "mean, std = mine.mean(0), mine.std(0)"),
        ("mine = rows.chunk(world)[rank]\nmine = mine.sub(mine.mean(0)).div(mine.std(0))\n", "mine = mine.sub(mine.mean(0)).div(mine.std(0))"),
        ("mine = torch.split(rows, len(rows) // world)[rank]\nmine = (mine - mine.mean(0)) / mine.std(0)\n", "mine = (mine - mine.mean(0)) / mine.std(0)"),
        ("mine = rows[rank::world]\nm, s = mine.mean(0), mine.std(0)\nscale = Normalize(m, s)\n", "m, s = mine.mean(0), mine.std(0)"),
        ("mine = [r for i, r in enumerate(rows) if i % world == rank]\nx = torch.stack(mine)\nx = (x - x.mean(0)) / x.std(0)\n", "x = (x - x.mean(0)) / x.std(0)"),
        (CLASS, "self.mean = self.x.mean(0)"),
        (SPAWNED, "x -= x.mean(axis=0)"),
        (LOADER, "mean = total / n"),
    ],
)  # fmt: skip
def test_constants_of_the_own_cut(tmp_path: Path, text: str, line: str) -> None:
    assert found(tmp_path, text) == [line]


A_SITE_EACH = """
for path in paths[rank::world]:
    x = read(path)
    parts.append((x - x.mean(0)) / x.std(0))
mine = torch.cat(parts)
"""
IN_A_HELPER = """
def scaled(path):
    x = read(path)
    return (x - x.mean(0)) / x.std(0)

mine = torch.cat([scaled(p) for p in paths[rank::world]])
"""


@pytest.mark.parametrize(
    "text",
    [
        "mean, std = rows.mean(0), rows.std(0)\nmine = rows[rank::world]\nmine = (mine - mean) / std\n",  # of all rows, before the cut
        "mine = sites[rank]\nmine = (mine - mine.mean(0)) / mine.std(0)\n",  # a site that the rank is
        'mine = read(f"site_{rank}.csv")\nmine = (mine - mine.mean(0)) / mine.std(0)\n',
        "parts = torch.split(rows, session_lengths)\nmine = parts[rank]\nmine = (mine - mine.mean(0)) / mine.std(0)\n",  # sessions of their own length
        A_SITE_EACH,  # each site by itself, whichever rank has it
        IN_A_HELPER,
        "for x, y in zip(rows[rank::world], y):\n    out = model((x - x.mean(0)) / x.std(0))\n",  # a batch, or a sample, by itself
        "mine = rows[rank::world]\nmine = (mine - mean[site]) / std[site]\n",  # a table of sites
        "mine = rows[rank::world]\nmine = (mine - 0.5) / 0.25\n",
        "torch.manual_seed(rank)\nmine = torch.randn(64, 3)\nmine = (mine - mine.mean(0)) / mine.std(0)\n",  # made data: no part of a whole
        "mine = rows[rank::world]\nscore = (mine.max() - mine.mean()) / len(mine)\n",  # no deviation
    ],
)
def test_scaling_that_is_right(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == []
