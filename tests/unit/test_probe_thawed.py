"""Frozen statistics that an outer train() sets moving: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import sites
from harness.probe.sensors import thawed

torch = pytest.importorskip("torch")
SITE = ("/home/u/train.py", 9, "main")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(thawed, "_parts", {})
    monkeypatch.setattr(thawed, "S", SimpleNamespace(compiling=False, steps=0, recorder=SimpleNamespace(event=lambda kind, site, **fields: found.append(fields))))
    monkeypatch.setattr(sites, "as_json", lambda site: None)
    yield found


def switch(module: Any, mode: bool) -> None:
    thawed.note_switch(module, mode, SITE)
    module.train(mode)


def net() -> Any:
    return torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), torch.nn.Linear(4, 2))


def freeze(part: Any) -> None:
    for p in part.parameters():
        p.requires_grad = False


def train(model: Any, before: Callable[[Any], None]) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(8):
        before(model)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        thawed._at_step(optimizer, SimpleNamespace(roots=[weakref.ref(model)]), None)


def frozen_first(model: Any) -> None:
    freeze(model[0])
    switch(model[0], False)


def evaluated(model: Any) -> None:
    freeze(model[0])
    with torch.no_grad():
        switch(model[0], False)


def whole(model: Any) -> None:
    freeze(model[0])
    switch(model, False)


def taken_back(model: Any) -> None:
    frozen_first(model)
    switch(model[0], True)


def not_frozen(model: Any) -> None:
    switch(model[0], False)


def each_time(model: Any) -> None:
    switch(model, True)
    switch(model[0], False)


def outer(model: Any) -> None:
    switch(model, True)


def test_an_outer_train_takes_the_eval_back(told: list[dict[str, Any]]) -> None:
    model = net()
    frozen_first(model)
    train(model, outer)
    assert [(one["norms"], one["steps"], one["frozen"]) for one in told] == [(1, 4, True)]


def test_frozen_after_its_eval(told: list[dict[str, Any]]) -> None:
    model = net()
    not_frozen(model)
    freeze(model[0])
    train(model, outer)
    assert [one["frozen"] for one in told] == [True]


def test_handed_out_in_eval_mode(told: list[dict[str, Any]]) -> None:
    model = net()
    thawed.note_switch(model[0], False, ("/home/u/train.py", 5, "load_backbone"))
    freeze(model[0])
    train(model, outer)
    assert [one["frozen"] for one in told] == [False]


def test_frozen_after_the_train_that_takes_it_back(told: list[dict[str, Any]]) -> None:
    model = net()
    not_frozen(model)
    switch(model, True)
    freeze(model[0])
    train(model, outer)
    assert [one["frozen"] for one in told] == [False]


def test_a_teacher_that_was_measured_before(told: list[dict[str, Any]]) -> None:
    model = net()
    evaluated(model)
    frozen_first(model)
    train(model, outer)
    assert [(one["steps"], one["frozen"]) for one in told] == [(4, True)]


@pytest.mark.parametrize(
    ("prepare", "before"),
    [
        (evaluated, outer), (whole, outer), (taken_back, outer), (not_frozen, outer), (frozen_first, each_time),
        (frozen_first, lambda model: None), (lambda model: freeze(model[0]), outer),
    ],
)  # fmt: skip
def test_healthy_neighbours(told: list[dict[str, Any]], prepare: Callable[[Any], None], before: Callable[[Any], None]) -> None:
    model = net()
    prepare(model)
    train(model, before)
    assert told == []
