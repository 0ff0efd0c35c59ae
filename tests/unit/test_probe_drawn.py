"""Attributes that a constructor draws at random and that forward reads: by the source of the class, and of none of its neighbours."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from harness.probe import drawn

SOURCE = '''
import random

import torch


def scaled(x):
    return x


class Plain(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.freqs = torch.randn(n, n) * 2
        base = torch.rand(n)
        self.shift = base * 3

    def forward(self, x):
        return self.encode(x) + self.shift

    def encode(self, x):
        return x @ self.freqs


class Buffer(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("freqs", torch.randn(n, n))

    def forward(self, x):
        return x @ self.freqs


class Sampler(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.fixed_noise = torch.randn(n, n)

    def forward(self, x):
        return x

    def sample(self):
        return self.forward(self.fixed_noise)


class OwnGenerator(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.freqs = torch.randn(n, n, generator=torch.Generator().manual_seed(0))

    def forward(self, x):
        return x @ self.freqs


class Computed(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.positions = torch.arange(n).float()

    def forward(self, x):
        return x + self.positions


class Inherits(Plain):
    pass


class NoiseBank(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bank = torch.randn(64 * n, n)

    def forward(self, x):
        if self.training:
            pick = torch.randint(len(self.bank), (len(x),))
            x = x + 0.1 * self.bank[pick]
        return x


class BankPickedInLine(NoiseBank):
    def forward(self, x):
        return x + self.bank[torch.randperm(self.bank.shape[0])[: len(x)]]


class BankMoved(NoiseBank):
    def forward(self, x):
        self.bank = self.bank.to(x.device)
        bank = self.bank.float()
        start = random.randrange(len(bank) - len(x))
        return x + bank[start : start + len(x)]


class BankBySelect(NoiseBank):
    def forward(self, x):
        return x + self.noise(len(x))

    def noise(self, num):
        at = torch.randint(0, self.bank.size(0), (num,))
        return self.bank.to("cpu").index_select(0, at)


class BankByFunction(NoiseBank):
    def forward(self, x):
        at = torch.empty(len(x), dtype=torch.long).random_(0, 64)
        return x + torch.index_select(self.bank, 0, at)


class Rolled(NoiseBank):
    def forward(self, x):
        return x + torch.roll(self.bank, int(torch.randint(9, ())), 0)[: len(x)]


class CodesByInput(NoiseBank):
    def forward(self, ids):
        return self.bank[ids]


class PickedAndWhole(NoiseBank):
    def forward(self, x):
        pick = torch.randint(len(self.bank), (len(x),))
        return x @ self.bank.T + self.bank[pick]


class WholeUnderAnotherName(NoiseBank):
    def forward(self, x):
        bank = self.bank.to(x.device)
        pick = torch.randint(len(bank), (len(x),))
        return (x + bank[pick]) @ bank.T


class RandomRowsOfTheInput(NoiseBank):
    def forward(self, x):
        x = x[torch.randperm(len(x))]
        return x @ self.bank.T


class ScaledAtRandom(NoiseBank):
    def forward(self, x):
        return torch.rand(()) * self.bank[: len(x)] + x
'''


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    path = Path(tmp_path_factory.mktemp("user")) / "script.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("script_of_a_user", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(kind: type) -> dict[str, int]:
    return {name: site[1] for name, site in drawn.attributes(kind).items()}


def test_drawn_and_read(classes: Any) -> None:
    assert names(classes.Plain) == {"freqs": 14, "shift": 16}
    assert names(classes.Inherits) == {"freqs": 14, "shift": 16}


@pytest.mark.parametrize("kind", ["CodesByInput", "PickedAndWhole", "WholeUnderAnotherName", "RandomRowsOfTheInput", "ScaledAtRandom"])
def test_a_bank_of_which_more_is_read_than_random_entries(classes: Any, kind: str) -> None:
    assert set(names(getattr(classes, kind))) == {"bank"}


BANKS = ["NoiseBank", "BankPickedInLine", "BankMoved", "BankBySelect", "BankByFunction", "Rolled"]


@pytest.mark.parametrize("kind", ["Buffer", "Sampler", "OwnGenerator", "Computed", *BANKS])
def test_healthy_neighbours(classes: Any, kind: str) -> None:
    assert names(getattr(classes, kind)) == {}


def test_a_class_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert drawn.attributes(torch.nn.Linear) == {}
