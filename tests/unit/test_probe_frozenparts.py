"""Frozen parameters of a wrapped model: what the sensor tells of a merge, of one that is taken out again, and of a part that training does not call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import paramwrites
from harness.probe.sensors import frozenparts, steps
from harness.probe.state import S


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(8, 8).requires_grad_(False)
        self.average = torch.nn.Linear(8, 8).requires_grad_(False)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.head(self.base(x))


def told(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Net], None], *, held: bool = False, training: bool = True) -> list[str]:
    found: list[str] = []

    def event(kind: str, *_: Any, **fields: Any) -> None:
        found.append(" ".join([kind, *fields.get("moved", ()), *fields.get("names", ())]))

    net = Net().train(training)
    params = dict(net.named_parameters())
    wrapped = SimpleNamespace(
        index=0, ignored=set(), ref=weakref.ref(net), grad={id(p): p.requires_grad for p in params.values()},
        names={id(p): n for n, p in params.items()}, refs={id(p): weakref.ref(p) for p in params.values()},
    )  # fmt: skip
    ids = [id(p) for p in params.values() if held or p.requires_grad]
    witness = SimpleNamespace(on_device=False, ids=ids)
    monkeypatch.setattr(S, "recorder", SimpleNamespace(event=event, errors=0, disabled=False))
    monkeypatch.setattr(S, "compiling", False)
    monkeypatch.setattr(steps, "_known", {0: witness})
    for name in ("_open", "_watched", "_hooks"):
        monkeypatch.setattr(frozenparts, name, [])
    frozenparts._at_wrap(wrapped)  # type: ignore[arg-type]
    for step in range(20):
        monkeypatch.setattr(S, "steps", step)
        net(torch.randn(2, 8))
        frozenparts._close(None)
        frozenparts._at_step(None, witness, [])
        if step == 9:
            with torch.no_grad():
                edit(net)
    assert not frozenparts._watched and not frozenparts._hooks
    return found


def merge(net: Net) -> None:
    net.base.weight += 0.1 * torch.randn(8, 8)


def merge_and_take_out(net: Net) -> None:
    delta = 0.1 * torch.randn(8, 8)
    for _ in range(10):
        net.base.weight += delta
        net.base.weight -= delta


def average(net: Net) -> None:
    net.average.weight.mul_(0.5)


def test_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, merge) == ["frozen_state", "frozen_state base.weight", "frozen_used base.weight"]
    assert told(monkeypatch, merge_and_take_out) == ["frozen_state", "frozen_state"]
    assert told(monkeypatch, average) == ["frozen_state", "frozen_state average.weight"]
    assert told(monkeypatch, lambda net: (merge(net), average(net))[0])[1:] == ["frozen_state base.weight average.weight", "frozen_used base.weight"]
    assert told(monkeypatch, lambda net: None) == ["frozen_state"]
    assert told(monkeypatch, merge, training=False) == ["frozen_state", "frozen_state base.weight"]
    assert told(monkeypatch, merge, held=True) == []  # an optimizer's: the rows tell


@pytest.mark.parametrize(
    ("line", "name", "hit"),
    [
        ("self.base.weight += d", "layers.0.base.weight", True),
        ("self.base.weight.data[3] = d", "layers.0.base.weight", True),
        ("layer.weight.data.add_(d)", "layers.0.base.weight", True),
        ("self.base.weight.requires_grad_(False)", "layers.0.base.weight", False),
        ("w = self.base.weight", "layers.0.base.weight", False),
        ("self.base.bias += d", "layers.0.base.weight", False),
    ],
)
def test_where_the_source_writes(tmp_path: Any, line: str, name: str, hit: bool) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"class Net:\n    def __init__(self):\n        self.base.weight.zero_()\n\n    def merge(self, d):\n        {line}\n")
    found = paramwrites.place(str(file), name)
    assert (found is not None and found[1] == 6) is hit
