"""A tensor that a module keeps as a plain attribute, found in the frames of the traceback. A stand-in for torch: importing it costs seconds."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from harness.probe import attributes

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, kept):
        self.layer = torch.Tensor("float64")
        self.freq = kept
        self.other = torch.Tensor("float32")

    def parameters(self):
        return iter([self.layer])

    def forward(self, x):
        return x @ self.freq @ self.layer

class Two(Net):
    def forward(self, x):
        return x @ self.freq @ self.other
"""


class Tensor:
    def __init__(self, dtype: str, device: str = "cpu") -> None:
        self.dtype, self.device = f"torch.{dtype}", device

    def is_floating_point(self) -> bool:
        return "float" in self.dtype

    def __rmatmul__(self, other: Any) -> Any:
        raise RuntimeError("expected m1 and m2 to have the same dtype, but got: double != float")


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    torch, nn = types.ModuleType("torch"), types.ModuleType("torch.nn")
    nn.Module = type("Module", (), {})  # type: ignore[attr-defined]
    torch.nn, torch.Tensor = nn, Tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch.nn", nn)
    path = tmp_path / "nets.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("nets_of_a_test", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def left(net: Any) -> Any:
    try:
        net.forward(1)
    except RuntimeError as error:
        return attributes.left_behind(str(error), error.__traceback__)
    return "no error"


def test_the_attribute_that_the_failing_function_uses(nets: Any) -> None:
    for kept in (Tensor("float32"), [Tensor("float32")]):
        found = attributes.left_behind("Expected all tensors to be on the same device", _tb(nets.Net(kept)))
        assert found is not None and (found["name"], found["module"], found["has"], found["wants"]) == (
            "freq", "Net", ["float32", "cpu"], ["float64", "cpu"],
        )  # fmt: skip
        assert found["set_at"]["line"] == 8
    found = left(nets.Net(Tensor("int64", "cuda:0")))
    assert found is not None and found["has"] == ["int64", "cuda:0"]


def test_what_is_no_such_attribute(nets: Any) -> None:
    assert left(nets.Net(Tensor("float64"))) is None  # the input was not cast
    assert left(nets.Net(Tensor("int64"))) is None  # an index: `.to(dtype)` leaves those of buffers alone too
    assert left(nets.Two(Tensor("float32"))) is None  # which of the two?
    assert attributes.left_behind("shapes cannot be multiplied", _tb(nets.Net(Tensor("float32")))) is None


def _tb(net: Any) -> Any:
    """The traceback of a forward that fails, whatever stands in the attribute."""
    try:
        net.forward(None)
    except (RuntimeError, TypeError) as error:
        return error.__traceback__
    return None
