"""Shared parameters that a worker takes out of shared memory: what the sensor finds in the worker, and in the parent afterwards."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.probe import names, sites  # noqa: E402
from harness.probe.sensors import takenout  # noqa: E402
from harness.probe.state import S  # noqa: E402

AT: sites.Site = ("train.py", 7, "main")


@pytest.fixture
def sensed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(
        event=lambda kind, site=None, **fields: found.append({"kind": kind, "site": site} | fields), disabled=False, errors=0, role="child"
    )  # fmt: skip
    for name in ("_models", "_seen", "_out_at", "_first"):
        monkeypatch.setattr(takenout, name, {})
    monkeypatch.setattr(takenout, "_hook", [])
    for name, value in (("group", None), ("recorder", recorder), ("loss_site", None), ("steps", 1), ("compiling", False)):
        monkeypatch.setattr(S, name, value)
    yield found
    for hook in takenout._hook:
        hook.remove()


def net() -> Any:
    made = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 2))
    made.share_memory()
    names.note_module(made)
    return made


def step(model: Any, at: int, move: bool = True) -> None:
    S.steps = at
    takenout._at_step(None, None, list(model.parameters()))
    if move:
        with torch.no_grad():
            for p in model.parameters():
                p += 1


def convert(model: Any) -> None:
    model.to(memory_format=torch.channels_last)
    takenout._note_converted(model, AT)


def assign(model: Any) -> None:
    model[0].weight.data = model[0].weight.data.clone()


@pytest.mark.parametrize(("take", "at"), [(convert, AT), (assign, sites.UNKNOWN)])
def test_a_worker_takes_a_parameter_out(take: Callable[[Any], None], at: sites.Site, sensed: list[dict[str, Any]]) -> None:
    model = net()
    takenout._giving(AT, [model])  # a forked child inherits the table
    take(model)
    step(model, 1)
    assert sensed == []
    step(model, 2)
    step(model, 8)
    (one,) = sensed
    assert (one["kind"], one["names"], one["shapes"], one["site"]) == ("taken_out", ["0.weight"], [[4, 3, 3, 3]], at)


def test_an_unpickled_model(sensed: list[dict[str, Any]]) -> None:
    model = net()
    takenout._unpickled(None, model[0])
    convert(model)
    step(model, 1)
    step(model, 2)
    assert sensed[0]["names"] == ["0.weight"]


def test_workers_that_lose_nothing(sensed: list[dict[str, Any]]) -> None:
    shared, frozen, private = net(), net(), pickle.loads(pickle.dumps(net()))  # the last is no shared memory
    for model in (shared, frozen, private):
        takenout._giving(AT, [model])
    convert(frozen)
    convert(private)
    for model, move in ((shared, True), (frozen, False), (private, True)):
        takenout._first.clear()
        step(model, 1, move)
        step(model, 2, move)
    assert sensed == []


def test_what_the_parent_finds(sensed: list[dict[str, Any]]) -> None:
    model = net()
    takenout._giving(AT, [model])
    with torch.no_grad():
        model[2].weight += 1
        model[2].bias += 1
        model[0].bias += 1
    takenout._joined()
    takenout._saving({"model": model.state_dict()}, AT, "m.pt")
    model(torch.ones(1, 3, 4, 4))
    assert [(e["how"], e["names"], e["num_changed"]) for e in sensed] == [("save", ["0.weight"], 3), ("forward", ["0.weight"], 3)]
    assert not takenout._hook


def test_a_parent_whose_model_came_back_or_never_changed(sensed: list[dict[str, Any]]) -> None:
    back, same = net(), net()
    takenout._giving(AT, [back, same])
    with torch.no_grad():
        for p in back.parameters():
            p.copy_(torch.ones_like(p))
    takenout._joined()
    back(torch.ones(1, 3, 4, 4))
    same(torch.ones(1, 3, 4, 4))  # all of it: another finding
    assert sensed == []
