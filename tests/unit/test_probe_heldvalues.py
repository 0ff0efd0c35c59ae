"""What the frames of a script hold: found by shape, named by the last variable or attribute, held no longer than the search."""

from __future__ import annotations

import copy
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from harness.probe import heldvalues, sites


class Ema:
    def __init__(self, net: nn.Module) -> None:
        self.shadow = {n: p.detach().clone() for n, p in net.named_parameters()}
        self.backup: list[Any] = []


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == __file__)
    monkeypatch.setattr(sites, "_is_user", {})
    monkeypatch.setattr(sites, "is_user_file", lambda name: name == __file__)


def found(shape: tuple[int, ...]) -> list[heldvalues.Held]:
    return heldvalues.tensors(sys._getframe(1), torch.Size(shape))


def test_variables_attributes_and_copies_of_a_model() -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    ema = Ema(net)
    ema.backup = [p.detach().clone() for p in net.parameters()]
    raw = copy.deepcopy(net)
    state = {"epoch": 3, "model": raw.state_dict()}
    names = [(one.name.name, one.name.line == heldvalues.ATTRIBUTE) for one in found((5, 3))]
    assert sorted(names) == [("backup", True), ("net", False), ("raw", False), ("shadow", True), ("state", False)]
    assert state and found((7, 7)) == []


def test_what_lies_there_later() -> None:
    ema = Ema(nn.Linear(3, 5))
    way = next(one.way for one in found((5, 3)) if one.name.name == "shadow")
    assert way is not None and way.end() is ema.shadow["weight"]
    ema.shadow["weight"] = torch.ones(5, 3)
    assert way.end() is ema.shadow["weight"]
    ema.shadow = {}
    assert way.end() is None
    del ema
    assert way.end() is None


def test_nothing_is_held_afterwards() -> None:
    kept = torch.zeros(4, 4)
    gone = weakref.ref(kept)
    assert len(found((4, 4))) == 1
    del kept
    assert gone() is None


def test_no_code_of_the_script_is_called() -> None:
    class Touchy(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise AssertionError

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

    touchy = Touchy(a=torch.zeros(2, 9))
    assert [one.name.name for one in found((2, 9))] == ["touchy"]
    assert len(dict.keys(touchy)) == 1
