"""An optimizer without state that torch.distributed.checkpoint is to read: told at its second step, unless state came by another way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe.sensors import emptyloads
from harness.probe.state import S


def metadata(*keys: str) -> Any:
    held = {"optimizer.param_groups.0.lr": SimpleNamespace(), "optimizer.state.0.step": SimpleNamespace(size=torch.Size(()))}
    return SimpleNamespace(state_dict_metadata=held | {k: SimpleNamespace(size=torch.Size((3, 2))) for k in keys},
                           storage_meta=SimpleNamespace(checkpoint_id="run/epoch3"))  # fmt: skip


HELD = metadata("optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq", "app.optim.state.0.exp_avg")


class Recorded:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def event(self, kind: str, site: Any = None, /, **fields: Any) -> None:
        self.told.append((kind, fields))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    recorded = Recorded()
    monkeypatch.setattr(S, "recorder", recorded)
    emptyloads._read.clear()
    emptyloads._waiting.clear()
    return recorded.told


def made(steps: int = 0) -> Any:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.AdamW([weight])
    for _ in range(steps):
        weight.grad = torch.ones(3, 2)
        optimizer.step()
    return optimizer


def read_out(optimizer: Any) -> Any:
    state = optimizer.state_dict()
    emptyloads._after_state_dict(state, optimizer)
    return state


def two_steps(optimizer: Any) -> None:
    for _ in range(2):
        emptyloads._at_step(optimizer)
        optimizer.param_groups[0]["params"][0].grad = torch.ones(3, 2)
        optimizer.step()


def test_an_optimizer_that_is_given_nothing(told: list[Any]) -> None:
    optimizer = made()
    emptyloads._at_plan(None, {"model": {}, "optimizer": read_out(optimizer)}, HELD)
    emptyloads._before_load(optimizer, {"state": {}, "param_groups": []})  # as dcp.load does
    two_steps(optimizer)
    two_steps(optimizer)
    ((kind, fields),) = told
    assert kind == "unfilled_optimizer" and fields == {"kind": "AdamW", "entry": "optimizer", "path": "run/epoch3", "held": 2,
                                                       "moments": ["exp_avg", "exp_avg_sq"], "loaded_at": S.steps}  # fmt: skip


def test_it_may_lie_deeper(told: list[Any]) -> None:
    optimizer = made()
    emptyloads._at_plan(None, {"app": {"net": {}, "optim": read_out(optimizer)}}, HELD)
    two_steps(optimizer)
    assert [fields["entry"] for _, fields in told] == ["app.optim"]


def test_state_that_comes_or_that_nobody_has(told: list[Any]) -> None:
    stepped = made(steps=1)
    emptyloads._at_plan(None, {"optimizer": read_out(stepped)}, HELD)
    stateless = made()
    emptyloads._at_plan(None, {"optimizer": read_out(stateless)}, metadata())  # a checkpoint without moments
    other = made()
    emptyloads._at_plan(None, {"other": read_out(other)}, HELD)  # under a name that is not in it
    filled = made()
    emptyloads._at_plan(None, {"optimizer": read_out(filled)}, HELD)
    filled.load_state_dict(stepped.state_dict())  # before a step
    between = made()
    emptyloads._at_plan(None, {"optimizer": read_out(between)}, HELD)
    emptyloads._at_step(between)  # set_optimizer_state_dict makes a step and loads
    emptyloads._before_load(between, stepped.state_dict())
    for optimizer in (stepped, stateless, other, filled, between):
        two_steps(optimizer)
    assert told == []
