"""A tensor that a module keeps as a plain attribute, found in the frames of the traceback."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.probe import attributes

torch = pytest.importorskip("torch")

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.freq = torch.ones(1, 4)
        self.index = torch.arange(4)
        self.other = torch.ones(3)
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x @ self.freq)

class Buffered(Net):
    def __init__(self):
        super().__init__()
        del self.freq
        self.register_buffer("freq", torch.ones(1, 4))

class Given(Net):
    def forward(self, x):
        return self.layer(x)
"""


@pytest.fixture
def nets(tmp_path: Path) -> Any:
    path = tmp_path / "nets.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("nets_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def left(net: Any, x: Any) -> Any:
    try:
        net.double()(x)
    except RuntimeError as error:
        return attributes.left_behind(str(error), sys.exc_info()[2])
    return "no error"


def test_the_attribute_that_the_failing_function_uses(nets: Any) -> None:
    found = left(nets.Net(), torch.ones(2, 1, dtype=torch.float64))
    assert found is not None and (found["name"], found["module"], found["has"][0], found["wants"][0]) == ("freq", "Net", "float32", "float64")
    assert found["set_at"]["line"] == 8


def test_what_is_no_such_attribute(nets: Any) -> None:
    assert left(nets.Buffered(), torch.ones(2, 1, dtype=torch.float64)) == "no error"
    assert left(nets.Buffered(), torch.ones(2, 1)) is None  # the input was not cast
    assert left(nets.Given(), torch.ones(2, 4)) is None
    assert left(nets.Net(), torch.ones(2, 3, dtype=torch.float64)) is None  # a shape, not a type
