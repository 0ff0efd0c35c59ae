"""Attributes that a constructor draws at random and that forward reads: by the source of the class, and of none of its neighbours."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from harness.probe import drawn

SOURCE = '''
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
    assert names(classes.Plain) == {"freqs": 12, "shift": 14}
    assert names(classes.Inherits) == {"freqs": 12, "shift": 14}


@pytest.mark.parametrize("kind", ["Buffer", "Sampler", "OwnGenerator", "Computed"])
def test_healthy_neighbours(classes: Any, kind: str) -> None:
    assert names(getattr(classes, kind)) == {}


def test_a_class_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert drawn.attributes(torch.nn.Linear) == {}
