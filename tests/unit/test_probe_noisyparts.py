"""Dropout of a frozen part that an outer train() puts back into train mode: told for a teacher, for features, and for none of their healthy neighbours."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe import sites
from harness.probe.sensors import noisyparts, thawed
from harness.probe.state import S

torch = pytest.importorskip("torch")
SITE = ("/home/u/train.py", 9, "main")


class Distiller(torch.nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
    """Or, with `behind`, a head that is trained on what the frozen part gives out."""

    def __init__(self, grad: bool, behind: bool) -> None:
        super().__init__()
        self.behind = behind
        self.teacher = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.3))
        self.student = torch.nn.Linear(4, 4)
        self.grad = grad

    def forward(self, x: Any) -> Any:
        with torch.set_grad_enabled(self.grad):
            soft = self.teacher(x)
        return self.student(soft).square().mean() if self.behind else (self.student(x) - soft).square().mean()


def switch(module: Any, mode: bool) -> None:
    thawed.note_switch(module, mode, SITE)
    module.train(mode)


def told(
    monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Any], None], *, grad: bool = False, again: bool = False, behind: bool = False
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, site, **fields: found.append(fields), disabled=False, errors=0)
    for name, value in (("recorder", recorder), ("compiling", False), ("steps", 0)):
        monkeypatch.setattr(S, name, value)
    monkeypatch.setattr(thawed, "_parts", {})
    for name, value in (("_seen", {}), ("_called", {}), ("_given", {}), ("_trained", []), ("_hooks", [])):
        monkeypatch.setattr(noisyparts, name, value)
    monkeypatch.setattr(sites, "as_json", lambda site: None)
    model = Distiller(grad, behind)
    prepare(model)
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    witness = SimpleNamespace(roots=[weakref.ref(model)])
    for _ in range(12):
        switch(model, True)
        if again:
            switch(model.teacher, False)
        model(torch.randn(8, 4)).backward()
        optimizer.step()
        if noisyparts._hooks:
            noisyparts._close(optimizer)
        if thawed._parts:
            thawed._at_step(optimizer, witness, None)
            noisyparts._at_step(optimizer, witness, None)
    noisyparts._close(optimizer)
    assert not noisyparts._hooks and not noisyparts._trained
    return found


def frozen_first(model: Any) -> None:
    model.teacher.requires_grad_(False)
    switch(model.teacher, False)


def test_what_a_frozen_part_gives_out_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    (teacher,) = told(monkeypatch, frozen_first)
    assert (teacher["drops"], teacher["steps"], teacher["frozen"], teacher["grad"], teacher["beside"]) == (1, 4, True, False, True)
    (backbone,) = told(monkeypatch, frozen_first, grad=True)
    assert backbone["grad"]
    (features,) = told(monkeypatch, frozen_first, behind=True)
    assert (features["grad"], features["beside"]) == (False, False)


def evaluated(model: Any) -> None:
    model.teacher.requires_grad_(False)
    with torch.no_grad():
        switch(model.teacher, False)


def no_dropout(model: Any) -> None:
    model.teacher[1].p = 0.0
    frozen_first(model)


@pytest.mark.parametrize("prepare", [
    evaluated, no_dropout, lambda model: model.teacher.requires_grad_(False), lambda model: switch(model.teacher, False),
])  # fmt: skip
def test_healthy(monkeypatch: pytest.MonkeyPatch, prepare: Callable[[Any], None]) -> None:
    assert told(monkeypatch, prepare) == []


def test_put_into_eval_mode_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, frozen_first, again=True) == []
