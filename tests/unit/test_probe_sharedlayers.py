"""Layers that another module sends to eval mode: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import sites
from harness.probe.sensors import layers, sharedlayers

torch = pytest.importorskip("torch")
SITE = ("/home/u/train.py", 9, "main")


def net() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 2))


def evaluate(module: Any) -> None:
    sharedlayers.note_switch(module, False, SITE)
    module.eval()
    with torch.no_grad():
        sharedlayers._at_eval_forward(module)


def run(monkeypatch: pytest.MonkeyPatch, evaluation: Callable[[Any], None], model: Any = None) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = []
    model = net() if model is None else model
    witness = SimpleNamespace(ids=[id(p) for p in model.parameters()], roots=[weakref.ref(model)])
    monkeypatch.setattr(sharedlayers, "S", SimpleNamespace(steps=5, compiling=False, recorder=SimpleNamespace(event=lambda kind, site, **f: told.append(f))))
    monkeypatch.setattr(sharedlayers, "_others", [])
    monkeypatch.setattr(sharedlayers.steps, "_known", {1: witness})
    monkeypatch.setattr(layers, "roots", lambda: [model])
    monkeypatch.setattr(sites, "as_json", lambda site: None)
    for step in range(10):
        if step == 4:
            evaluation(model)
        sharedlayers._at_step(None, witness)
    return told


def through_a_shallow_copy(model: Any) -> None:
    evaluate(copy.copy(model))


def through_a_part(model: Any) -> None:
    evaluate(torch.nn.Sequential(*list(model.children())[:2]))


def test_a_shallow_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(one["layers"], one["whole"]) for one in run(monkeypatch, through_a_shallow_copy)] == [(["1"], True)]
    assert [(one["module"], one["whole"]) for one in run(monkeypatch, through_a_part)] == [("Sequential", False)]


def frozen(model: Any) -> None:
    for p in model.parameters():
        p.requires_grad = False
    through_a_part(model)


def not_called(model: Any) -> None:
    """Layers that are put into eval mode for good, under a list that holds them."""
    sharedlayers.note_switch(torch.nn.ModuleList([model[1]]), False, SITE)
    model[1].eval()


def put_back(model: Any) -> None:
    through_a_shallow_copy(model)
    model.train()


def deep(model: Any) -> None:
    evaluate(copy.deepcopy(model))


def itself(model: Any) -> None:
    evaluate(model)
    model.train()


def child(model: Any) -> None:
    evaluate(model[1])


def around(model: Any) -> None:
    evaluate(torch.nn.Sequential(model))


@pytest.mark.parametrize("evaluation", [frozen, not_called, put_back, deep, itself, child, around])
def test_healthy_neighbours(monkeypatch: pytest.MonkeyPatch, evaluation: Callable[[Any], None]) -> None:
    assert run(monkeypatch, evaluation) == []


def test_without_layers_that_care(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, through_a_shallow_copy, torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))) == []
