"""Modules in a plain list of a model that is trained: told for the mistake, and for none of its healthy neighbours."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from harness.probe import names, sites
from harness.probe.sensors import unregistered

torch = pytest.importorskip("torch")
nn = torch.nn


def helper(size: int) -> Any:
    return nn.Linear(size, size)


class Base(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.head(sum(m(x) for m in self.parts))


class Listed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to("cpu") for _ in range(3)]


class Appended(Base):
    def __init__(self) -> None:
        super().__init__()
        layers = []
        for _ in range(2):
            layers.append(nn.Linear(4, 4))
        self.parts = layers


class Keyed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}


class One(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(4, 4)]


class FromOutside(Base):
    def __init__(self, models: Any = None) -> None:
        super().__init__()
        self.parts = [nn.Linear(4, 4), nn.Linear(4, 4)] if models is None else list(models)


class FromHelper(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [helper(4) for _ in range(3)]


class Registered(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class Tied(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.parts = [self.a, self.a]


class Later(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.parts = nn.ModuleList(self.parts)


class Filters(Base):
    """Fixed ones, no parameters on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [nn.Linear(4, 4, bias=False) for _ in range(2)]
        for part, taps in zip(self.parts, (torch.eye(4), torch.ones(4, 4)), strict=True):
            part.weight.data.copy_(taps)


class Fixed(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4, bias=False)
        self.mix.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Any) -> Any:
        return self.mix(x)


class FixedParts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.parts = [Fixed() for _ in range(2)]


def find(monkeypatch: pytest.MonkeyPatch, model: Any, *, trained: Any = None, lost: Any = None) -> dict[int, tuple[str, sites.Site]]:
    parts = list(model.parts.values() if isinstance(model.parts, dict) else model.parts)
    held = {id(p): None for p in (model.parameters() if trained is None else trained)}
    reached = [p for m in parts for p in m.parameters()] if lost is None else lost
    roots = [model] if isinstance(model.parts, nn.ModuleList) else [model, *parts]
    monkeypatch.setattr(names, "root_modules", lambda: roots)
    monkeypatch.setattr(sites, "is_user_file", lambda name: name == __file__)
    return unregistered.find({id(p) for p in reached if id(p) not in held and p.requires_grad}, held)


@pytest.mark.parametrize(("kind", "name"), [(Listed, "parts[0].0.weight"), (Appended, "parts[0].weight"), (Keyed, "parts[a].weight")])
def test_several_made_by_the_constructor(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> None:
    found = find(monkeypatch, kind())
    assert name in {n for n, _ in found.values()} and {site[2] for _, site in found.values()} == {"__init__"}
    wrapped = {n for n, _ in find_below(monkeypatch, kind()).values()}
    assert f"0.{name}" in wrapped


def find_below(monkeypatch: pytest.MonkeyPatch, model: Any) -> dict[int, tuple[str, sites.Site]]:
    parts = list(model.parts.values() if isinstance(model.parts, dict) else model.parts)
    monkeypatch.setattr(names, "root_modules", lambda: [nn.Sequential(model), *parts])
    return unregistered.find({id(p) for m in parts for p in m.parameters()}, {id(p): None for p in model.parameters()})


@pytest.mark.parametrize("kind", [One, FromOutside, FromHelper, Registered, Tied, Later, Filters, FixedParts])
def test_other_containers(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    assert find(monkeypatch, kind()) == {}


def test_left_out_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, quiet, loaded, other, unreached, untrained = (Listed() for _ in range(6))
    for part in frozen.parts:
        part.requires_grad_(False)
    for part in quiet.parts:
        part.eval()
    unregistered._at_load(loaded.parts[0], None, None)
    assert all(find(monkeypatch, model) == {} for model in (frozen, quiet, loaded))
    assert find(monkeypatch, other, trained=[*other.parameters(), *other.parts[0].parameters()]) == {}  # some of them stand in an optimizer
    assert find(monkeypatch, unreached, lost=[]) == {}
    assert find(monkeypatch, untrained, trained=[]) == {}
    del loaded, frozen
    assert find(monkeypatch, copy.deepcopy(Listed())) != {}
