"""The statement that writes a model's own buffer is found in forward, and in what forward calls."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from harness.probe import bufferwrites

MODEL = '''
import torch


class Quantizer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))
        self.register_buffer("usage", torch.zeros(3))
        self.codes.zero_()

    def reset(self):
        self.codes.zero_()

{methods}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.vq = Quantizer()
'''
DIRECT = '''
    def forward(self, x):
        self.codes.lerp_(x, 0.1)
'''
CALLED = '''
    @torch.no_grad()
    def _update(self, x):
        y = x + 1
        self.usage.lerp_(y, 0.1)
        self.codes.copy_(y)

    def forward(self, x):
        self._update(x)
'''
NEVER = '''
    def forward(self, x):
        return x + self.codes
'''


@pytest.mark.parametrize(("methods", "wanted"), [(DIRECT, "self.codes.lerp_(x, 0.1)"), (CALLED, "self.usage.lerp_(y, 0.1)"), (NEVER, None)])
def test_where_a_buffer_is_written(tmp_path: Path, methods: str, wanted: str | None) -> None:
    path = tmp_path / "model.py"
    path.write_text(MODEL.format(methods=methods))
    spec = importlib.util.spec_from_file_location("model_with_buffers", path)
    assert spec is not None and spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found = bufferwrites.place(made.Net(), ["vq.codes", "vq.usage"])
    line = path.read_text().splitlines()[found["line"] - 1].strip() if found else None
    assert line == wanted
