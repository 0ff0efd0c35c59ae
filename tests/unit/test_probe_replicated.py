"""Parameters that DDP covers, and those that are trained beside it, are known by their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.probe import marks, replicated
from harness.probe.sensors import ddp
from harness.probe.state import S


@pytest.fixture
def outer(monkeypatch: pytest.MonkeyPatch) -> Any:
    outer = torch.nn.Module()
    outer.module = torch.nn.Linear(4, 3)
    outer.parameters_to_ignore = ["bias"]  # type: ignore[assignment]
    monkeypatch.setattr(S, "ddps", [ddp.Wrapped(outer, 0)])
    monkeypatch.setattr(S, "steps", 0)
    monkeypatch.setattr(replicated, "_read_at", [(-1, -1)])
    return outer


def test_what_is_trained_beside_ddp(outer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*outer.module.parameters(), *head.parameters()], lr=0.1)
    monkeypatch.setattr(marks, "optimizers", lambda: [optimizer])
    assert replicated.beside(head.weight.data) and replicated.beside(outer.module.bias.detach())
    assert replicated.digest(outer.module.weight.data) and not replicated.beside(outer.module.weight)
    assert not replicated.beside(head.weight.detach().clone()) and not replicated.beside(head.weight[:1])
