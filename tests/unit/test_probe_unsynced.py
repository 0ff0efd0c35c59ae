"""Steps that FSDP2's gradients have no part in, because a backward was told not to reduce them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import fullyshard, sites
from harness.probe.sensors import steps, unsynced
from harness.probe.state import S
from tests.unit.test_probe_fullyshard import model as model  # a fixture


def trained(monkeypatch: pytest.MonkeyPatch, model: Any, synced: tuple[bool, ...], params: Any = None) -> list[tuple[int, int]]:
    """(waiting, of these without another gradient) at the step behind these backwards."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(S, "recorder", SimpleNamespace(event=lambda kind, site, **fields: found.append((fields["num"], fields["none"])), disabled=False))
    monkeypatch.setattr(steps, "witness_of", lambda optimizer: SimpleNamespace(opt=0))
    monkeypatch.setattr(sites, "here", lambda depth: sites.UNKNOWN)
    monkeypatch.setattr(unsynced, "_off", {})
    monkeypatch.setattr(unsynced, "_told", [0])
    optimizer = torch.optim.SGD(params if params is not None else model.parameters(), lr=0.1)
    for sync in synced:
        model.set_requires_gradient_sync(sync)
        unsynced._note(model, sync)
        model(torch.randn(3, 4)).sum().backward()
    if unsynced._off:
        unsynced._at_step(optimizer)
    return found


def test_gradients_that_wait(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    assert fullyshard.waiting(model, list(model.modules())) == []
    assert trained(monkeypatch, model, (False, False)) == [(6, 6)]
    assert {name for name, *_ in fullyshard.waiting(model, list(model.modules()))} == {f"{i}.{n}" for i in range(3) for n in ("weight", "bias")}


def test_the_first_micro_batch_in_place_of_the_last(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    assert trained(monkeypatch, model, (True, False)) == [(6, 0)]


def test_the_last_micro_batch_reduces(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    assert trained(monkeypatch, model, (False, True)) == []


def test_another_optimizer_steps(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    assert trained(monkeypatch, model, (False,), params=list(torch.nn.Linear(2, 2).parameters())) == []
