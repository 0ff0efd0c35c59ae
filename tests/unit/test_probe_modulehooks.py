"""The probe makes way for dynamo: what torch.compile and torch.export find."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness.probe import copies, modulehooks
from harness.probe.sensors import modes, swappedin
from harness.probe.state import S

registry = torch.nn.modules.module


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    recorder = SimpleNamespace(event=lambda kind, site, **fields: found.append(kind), disabled=False, errors=0)
    for name, value in (("recorder", recorder), ("compiling", False)):
        monkeypatch.setattr(S, name, value)
    monkeypatch.setattr(modes, "_compiled", [False])
    monkeypatch.setattr(modes.rng, "_originals", [])
    yield found
    copies.stop()
    modulehooks.remove(swappedin._hook)
    assert recorder.errors == 0


def test_an_export_finds_no_hook_and_no_copy_of_ours(told: list[str]) -> None:
    def users(module: Any, args: Any) -> None:
        pass

    handle = registry.register_module_forward_pre_hook(users)
    copies.watch("test", lambda written, source, site: False)
    swappedin._listen()
    assert len(registry._global_forward_pre_hooks) == 2
    modes._make_way()
    assert list(registry._global_forward_pre_hooks.values()) == [users]
    assert S.compiling and "copy_" not in vars(torch.Tensor) and not told  # an export is not told as a compile
    copies.watch("test", lambda written, source, site: False)
    assert "copy_" not in vars(torch.Tensor)
    modes._before_compile()
    modes._before_compile()
    assert told == ["compile"]
    handle.remove()


def test_exports_are_seen_before_they_begin(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in ((torch, ("compile",)), (nn.Module, ("train", "compile", "__init__", "__setstate__")), (torch.export, modes.EXPORTS)):
        for name in names:
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(nn.DataParallel, "__init__", nn.DataParallel.__init__)
    calls: list[Any] = []
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: calls.append(S.compiling))
    monkeypatch.setattr(modes, "on_import", lambda name, call: call(dynamo))
    dynamo = SimpleNamespace(export=lambda f: calls.append(S.compiling), optimize=lambda f: calls.append(S.compiling))
    modes.arm()
    for begin in (lambda: torch.export.export(nn.Linear(1, 1), ()), lambda: dynamo.export(None), lambda: dynamo.optimize(None)):  # type: ignore[no-untyped-call]
        S.compiling = False
        begin()
    assert calls == [True] * 3 and told == ["compile"]


def test_handles_are_taken_once_each() -> None:
    taken: list[int] = []
    handles = [SimpleNamespace(remove=lambda i=i: taken.append(i)) for i in range(3)]
    handles[2].remove = handles.clear  # another thread was faster
    modulehooks.remove(handles)
    assert not taken and not handles
