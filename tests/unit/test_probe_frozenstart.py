"""Frozen parameters beside those of an optimizer that takes its first step, where a file was loaded: what the sensor tells."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import digests
from harness.probe.sensors import frozenstart, saving
from harness.probe.state import S


@pytest.mark.parametrize(("file", "began", "told"), [
    (("model/module.0.weight", "module.0.bias"), False, ["0.weight", "0.bias"]),
    (("module.1.weight",), False, []),  # trained
    (("other.weight",), False, []),
    (("0.weight",), True, []),  # not its first step
])  # fmt: skip
def test_frozen_parameters_with_a_name_in_a_file(monkeypatch: pytest.MonkeyPatch, file: tuple[str, ...], began: bool, told: list[str]) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(S, "recorder", SimpleNamespace(event=lambda kind, **fields: found.append({"kind": kind} | fields)))
    monkeypatch.setattr(frozenstart, "_told", [0])
    net = torch.nn.Sequential(torch.nn.Linear(2, 2).requires_grad_(False), torch.nn.Linear(2, 1))
    tensor = torch.zeros(1)
    monkeypatch.setattr(saving, "_loaded", [("m.pt", {i: (weakref.ref(tensor), name) for i, name in enumerate(file)})])
    witness = SimpleNamespace(began=began, opt=0, ids=[id(p) for p in net[1].parameters()], roots=[weakref.ref(net)])
    frozenstart._at_step(None, witness, [])
    assert [n for e in found for n in e["names"]] == told
    assert all(e["each"] == digests.of_tensors(list(net[0].parameters()))[1] for e in found)
