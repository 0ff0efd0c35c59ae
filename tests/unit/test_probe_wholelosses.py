"""Where a loss is divided by the number of ranks, or by the batch of all ranks: read from the source, for none of its healthy neighbours."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from harness.probe import syntax, wholelosses

NUMBERS = count()  # a file is parsed once: each has a name of its own
START = """
import os
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
"""


def found(tmp_path: Path, text: str, kind: str = "ranks") -> str:
    file = tmp_path / f"script{next(NUMBERS)}.py"
    file.write_text(START + text)
    lines = file.read_text().splitlines()
    at = next(i for i, line in enumerate(lines, 1) if ".backward(" in line)
    tree = syntax.tree(str(file))
    assert tree is not None
    read = wholelosses.by_ranks if kind == "ranks" else wholelosses.by_whole_batch
    site = read((str(file), at, ""), ((str(file), tree),))
    return lines[site[1] - 1].strip() if site is not None else ""


CLASS = """
class Objective(nn.Module):
    def forward(self, out, y):
        return (nll(out, y) + 0.1 * self.penalty()) / dist.get_world_size()

class Trainer:
    def __init__(self):
        self.criterion = Objective()

    def step(self, x, y):
        loss = self.criterion(self.model(x), y)
        self.scaler.scale(loss).backward()
"""
HELPER = """
def losses(out, y, world_size):
    ce = nn.functional.cross_entropy(out, y)
    ce = ce / world_size
    return ce, {"shown": ce.item()}

def train(world_size):
    loss, logs = losses(model(x), y, world_size)
    loss.backward()
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loss = criterion(model(x), y) / dist.get_world_size()\nloss.backward()\n", "loss = criterion(model(x), y) / dist.get_world_size()"),
        ('world = int(os.environ["WORLD_SIZE"])\nloss = criterion(model(x), y)\nloss /= world\nloss.backward()\n', "loss /= world"),
        ("n = dist.get_world_size()\nloss = criterion(model(x), y)\n(loss / n / 4).backward()\n", "(loss / n / 4).backward()"),
        ("loss = criterion(model(x), y)\nloss.div_(dist.get_world_size())\nloss.backward()\n", "loss.div_(dist.get_world_size())"),
        (CLASS, "return (nll(out, y) + 0.1 * self.penalty()) / dist.get_world_size()"),
        (HELPER, "ce = ce / world_size"),
    ],
)
def test_divided_by_the_number_of_ranks(tmp_path: Path, text: str, line: str) -> None:
    assert found(tmp_path, text) == line


PARTS = """
world = dist.get_world_size()
loss = 0.0
for part in gathered:
    loss = loss + contrast(q, part)
(loss / world).backward()
"""
NANO = """
world = dist.get_world_size()
accumulation = 8
accumulation //= world
loss = criterion(model(x), y) / accumulation
loss.backward()
"""
BRANCH = """
def losses(out, y):
    if dist.is_initialized():
        return criterion(out, y) / dist.get_world_size()
    return criterion(out, y)

losses(model(x), y).backward()
"""


@pytest.mark.parametrize(
    "text",
    [
        "loss = criterion(model(x), y)\nloss.backward()\nshown = loss.detach() / dist.get_world_size()\n",  # for the log
        "loss = criterion(model(x), y)\nloss.backward()\nloss /= dist.get_world_size()\n",  # after it
        "loss = criterion(model(x), y) / tokens\nloss.backward()\n",
        "loss = criterion(model(x), y) / dist.get_world_size(group)\nloss.backward()\n",  # of some of the ranks
        "loss = criterion(model(x), y) + penalty() / dist.get_world_size()\nloss.backward()\n",  # a part of it
        "loss = loss_sum / (len(x) * dist.get_world_size())\nloss.backward()\n",
        "loss = sum(contrast(q, k) for k in gathered) / dist.get_world_size()\nloss.backward()\n",  # a term for each rank's keys
        PARTS,
        NANO,
        BRANCH,  # which of them ran is not known
    ],
)
def test_losses_that_are_not_divided_so(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text) == ""


WHOLE = """
class Loss:
    def __init__(self, hyper):
        {made}

    def __call__(self, out, y):
        return error(out, y).sum() / self.norm

loader = DataLoader(data, batch_size=hyper.images // dist.get_world_size())
criterion = Loss(hyper)
loss = criterion(model(x), y)
loss.backward()
"""


def test_divided_by_the_batch_of_all_ranks(tmp_path: Path) -> None:
    assert found(tmp_path, WHOLE.format(made="self.norm = hyper.images"), "batch") == "self.norm = hyper.images"
    direct = "local = images // dist.get_world_size()\nloader = DataLoader(data, batch_size=local)\nloss = error(x).sum() / images\nloss.backward()\n"
    assert found(tmp_path, direct, "batch") == "loss = error(x).sum() / images"


@pytest.mark.parametrize(
    "text",
    [
        WHOLE.format(made="self.norm = hyper.images // dist.get_world_size()"),
        WHOLE.format(made="self.norm = hyper.slots"),
        "loader = DataLoader(data, batch_size=images)\nloss = error(x).sum() / images\nloss.backward()\n",  # each rank has a batch of its own
        "loader = DataLoader(data, batch_size=images // dist.get_world_size())\nloss = error(x).mean()\nloss.backward()\nshown = loss / images\n",
    ],
)
def test_divided_by_another_number(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, text, "batch") == ""
