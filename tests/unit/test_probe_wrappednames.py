"""Loops over a wrapper's parameters that ask for names without its prefix: what is found in the source, and what the optimizer shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import nametests, sites
from harness.probe.sensors import wrappednames
from harness.probe.state import S

BARE = ["backbone.0.weight", "backbone.0.bias", "head.weight", "head.bias", "token"]
GIVEN = [f"module.{n}" for n in BARE]
VARIABLES: dict[str, Any] = {
    "SKIP": {"token", "head.bias"}, "LEADS": ("backbone.", "stem."), "RATES": {"backbone": 0.1}, "cfg": SimpleNamespace(frozen=("backbone.0",)),
    "BOTH": ("backbone.", "module.backbone."), "groups": {},
}  # fmt: skip


def found(body: str, header: str = "for name, p in model.named_parameters():") -> str:
    """The test that is blind in a loop, as it is spelt; "" for none."""
    source = f"{header}\n{body}\n"

    def lookup(wanted: str) -> Any:
        if wanted not in VARIABLES:
            raise nametests.Unknown
        return VARIABLES[wanted]

    for loop in nametests.loops(ast.parse(source), 1):
        if (test := nametests.blind(loop, GIVEN, BARE, lookup)) is not None:
            return nametests.spelt(loop, test)
    return ""


@pytest.mark.parametrize(("body", "test"), [
    ("    if name.startswith('backbone.'): slow.append(p)", "name.startswith('backbone.')"),
    ("    (slow if name in SKIP else fast).append(p)", "name in SKIP"),
    ("    p.requires_grad = not name.startswith(cfg.frozen)", "not name.startswith(cfg.frozen)"),
    ("    top = name.split('.')[0]\n    if top == 'head' and p.dim() > 1: fast.append(p)", "top == 'head'"),
    ("    slow.append({'params': [p], 'lr': rate * RATES.get(name.split('.')[0], 1.0)})", "RATES.get(name.split('.')[0], 1.0)"),
    ("    if any(name.startswith(lead) for lead in LEADS): slow.append(p)", "any((name.startswith(lead) for lead in LEADS))"),
    ("    if re.match('head', name): fast.append(p)", "re.match('head', name)"),
    ("    if p.dim() < 2: continue\n    elif name == 'head.weight': fast += [p]", "name == 'head.weight'"),
])  # fmt: skip
def test_tests_that_are_blind(body: str, test: str) -> None:
    assert found(body) == test


@pytest.mark.parametrize("body", [
    "    if 'backbone.' in name: slow.append(p)",
    "    if name.endswith('bias'): slow.append(p)",
    "    if name.startswith('module.backbone.'): slow.append(p)",
    "    if name.startswith(BOTH): slow.append(p)",
    "    if name.startswith('backbone.') or name.startswith('module.backbone.'): slow.append(p)",
    "    name = name.removeprefix('module.')\n    if name.startswith('backbone.'): slow.append(p)",
    "    bare = name.removeprefix('module.')\n    if bare.startswith('backbone.'): slow.append(p)",
    "    if name.startswith('encoder.'): slow.append(p)",
    "    parent = name.rpartition('.')[0] if '.' in name else ''",
    "    if name.startswith('backbone.'): print(name, p.shape)",
    "    if name.startswith(unread): slow.append(p)",
    "    if int(name.split('.')[1]) < 6: slow.append(p)",
    "    groups[name] = p",
    "    if p.dim() < 2: slow.append(p)",
])  # fmt: skip
def test_tests_that_are_not(body: str) -> None:
    assert found(body) == ""


def test_comprehensions() -> None:
    assert found("", "wrapped = not any(n.startswith('backbone.') for n, p in model.named_parameters())") == ""  # asks how the names are spelt
    assert found("", "[p for n, p in list(model.named_parameters()) if n.startswith('backbone.')]") == "n.startswith('backbone.')"
    assert found("", "{n: p.norm() for n, p in model.named_parameters() if p.grad is not None}") == ""
    assert found("    if n.startswith('backbone.'): slow.append(p)", "for n, p in enumerate(model.parameters()):") == ""


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)


SCRIPT = """
def groups(model, lead, both=False):
    slow, fast = [], []
    for name, p in model.named_parameters():
        (slow if name.startswith(lead) else fast).append(p)
    return [{"params": slow, "lr": 0.1}, {"params": fast}]


def main(model, lead):
    return groups(model, lead)


def knows(model, lead):
    for name, p in model.named_parameters():
        if name.startswith(lead):
            p.requires_grad = False
    print("names begin with module.")
"""


@pytest.fixture
def sensed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, site, **fields: told.append({"line": site[1]} | fields), disabled=False, errors=0)
    for name, value in (("recorder", recorder), ("light", False), ("steps", 0)):
        monkeypatch.setattr(S, name, value)
    for name, fresh in (("_found", []), ("_told", [0]), ("_looked", set())):
        monkeypatch.setattr(wrappednames, name, fresh)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    space: dict[str, Any] = {}
    exec(compile(SCRIPT, str(path), "exec"), space)
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == str(path))
    monkeypatch.setattr(sites, "_is_user", {})
    monkeypatch.setattr(torch.nn.DataParallel, "named_parameters", wrappednames._named_parameters(torch.nn.Module.named_parameters), raising=False)
    yield told, space
    assert recorder.errors == 0


def step(groups: list[dict[str, Any]]) -> None:
    wrappednames._at_step(torch.optim.SGD(groups, lr=0.1), SimpleNamespace(opt=0, began=False), [])


def test_an_empty_group_and_where_the_wrapper_was_handed_over(sensed: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    told, space = sensed
    model = torch.nn.DataParallel(Net())
    step(space["main"](model, "backbone."))
    (one,) = told
    assert (one["line"], one["given_at"]["line"], one["effect"], one["prefix"]) == (5, 10, "group", "module.")
    assert (one["fits"], one["num"], one["wrapper"]) == (2, 4, "DataParallel")


def test_what_is_no_mistake_is_not_told(sensed: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    told, space = sensed
    model = torch.nn.DataParallel(Net())
    step(space["main"](model.module, "backbone."))  # the names of the model inside
    step(space["main"](model, "stem."))  # fits no name at all: asked once a statement
    space["knows"](model, "backbone.")
    assert told == [] and wrappednames._found == []


def test_another_optimizer_tells_nothing_of_it(sensed: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
    told, space = sensed
    model = torch.nn.DataParallel(Net())
    space["main"](model, "backbone.")
    for _ in range(wrappednames.MAX_LOOKS + 1):
        step([{"params": list(torch.nn.Linear(2, 2).parameters())}])
    assert told == [] and wrappednames._found == []
