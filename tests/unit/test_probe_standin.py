"""What stands in for a function of torch's is found where torch's own is looked up."""

from __future__ import annotations

import inspect
import pickle
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.func
import torch.fx

from harness.probe import sites
from harness.probe.sensors import rng
from harness.probe.standin import stand_in
from harness.probe.state import S

asked: list[Any] = []


class Asking(torch.Tensor):
    table: dict[Any, str] = {}  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append(cls.table.get(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def draw() -> list[Any]:
    value = torch.full((2,), 0.5).as_subclass(Asking)
    asked.clear()
    torch.randn_like(value)
    value.uniform_()
    return list(asked)


def test_tables_know_it_from_before_and_from_within(monkeypatch: pytest.MonkeyPatch) -> None:
    like, uniform = torch.randn_like, torch.Tensor.uniform_
    outside = {like: "like", uniform: "uniform"}
    monkeypatch.setattr(torch, "randn_like", stand_in(like, lambda *args, **kwargs: like(*args, **kwargs)))
    monkeypatch.setattr(torch.Tensor, "uniform_", stand_in(uniform, lambda *args, **kwargs: uniform(*args, **kwargs)))
    inside: dict[Any, str] = {torch.randn_like: "like", torch.Tensor.uniform_: "uniform"}
    found = []
    for table in (outside, inside):
        Asking.table = table
        found.append(draw())
    monkeypatch.undo()
    found.append(draw())  # what was made meanwhile is good afterwards
    assert found == [["like", "uniform"]] * 3


def test_it_passes_for_the_original_and_adds_no_frame() -> None:
    made = stand_in(torch.rand, lambda: sys._getframe(1).f_code)
    assert made() is inspect.currentframe().f_code  # type: ignore[union-attr]
    assert pickle.loads(pickle.dumps(made)) is torch.rand and made.__name__ == "rand" and repr(made) == repr(torch.rand)

    class Holder:
        fill = made

    assert Holder().fill is made  # as a function of C is: not bound


def test_all_that_draw_equal_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    originals = [getattr(torch, name) for name in rng.FUNCTIONS]
    for owner, name, original in ((torch, n, o) for n, o in zip(rng.FUNCTIONS, originals, strict=True)):
        monkeypatch.setattr(owner, name, stand_in(original, rng._make(name)(original)))
    assert [getattr(torch, name) for name in rng.FUNCTIONS] == originals and {*originals} == {getattr(torch, name) for name in rng.FUNCTIONS}


def test_a_draw_that_is_recorded_or_wrapped_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = SimpleNamespace(event=lambda *args, **fields: None, disabled=False, errors=0)
    for name, value in (("recorder", recorder), ("steps", 0), ("backwards", 0)):
        monkeypatch.setattr(S, name, value)
    monkeypatch.setattr(rng, "early", [0, 0, 0])
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == __file__)
    monkeypatch.setattr(torch, "randn_like", stand_in(torch.randn_like, rng._make("randn_like")(torch.randn_like)))

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)

    graph = torch.fx.symbolic_trace(noisy).graph
    assert [n.op for n in graph.nodes] == ["placeholder", "call_function", "call_function", "output"] and rng.early[0] == 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # torch.jit is deprecated
        warnings.filterwarnings("error", category=torch.jit.TracerWarning)
        torch.jit.trace(noisy, (torch.zeros(3),), check_trace=False)
    assert rng.early[0] == 0
    torch.func.vmap(noisy, randomness="different")(torch.zeros(2, 3))
    assert rng.early[0] == 0
    noisy(torch.zeros(3))
    assert rng.early[0] == 1 and recorder.errors == 0
