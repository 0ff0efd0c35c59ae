"""Copies into weights that an optimizer trains: which statements the sensor tells, and what is left of its patch."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import copies, digests, sites
from harness.probe.sensors import overwrites
from harness.probe.state import S


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, site, **fields: found.append({"kind": kind, "line": site[1]} | fields), disabled=False, errors=0)
    for name, value in (("recorder", recorder), ("steps", 1), ("compiling", False)):
        monkeypatch.setattr(S, name, value)
    monkeypatch.setattr(overwrites, "_asked", {})
    monkeypatch.setattr(overwrites, "_told", [0])
    monkeypatch.setattr(sites, "is_user_code", lambda code: code.co_filename == __file__)
    copies.watch("test", overwrites._look)
    yield found
    copies.leave("test")
    assert "copy_" not in vars(torch.Tensor) and recorder.errors == 0


def weights(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(3))
    monkeypatch.setattr(overwrites, "_weights", lambda: frozenset({digests.address(p)}))
    return p


def test_copies_into_weights_are_told_once_a_step(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    p = weights(monkeypatch)
    for step in (1, 1, 2):
        S.steps = step
        p.data.copy_(torch.ones(3))
    torch._foreach_copy_([p.data], [torch.full((3,), 2.0)])
    assert len(told) == 3 and p.tolist() == [2.0, 2.0, 2.0]


def test_other_copies_are_not(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    p, shadow = weights(monkeypatch), torch.zeros(3)
    for step in range(overwrites.MAX_MISSES + 1):
        S.steps = step
        for target in (shadow, p.data) if step == overwrites.MAX_MISSES else (shadow,):
            target.copy_(torch.ones(3))
    assert told == []  # a statement that has moved an average all the time is asked no more


def test_nothing_is_watched_once_something_is_compiled(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    p = weights(monkeypatch)
    monkeypatch.setattr(S, "compiling", True)
    p.data.copy_(torch.ones(3))
    assert told == [] and "copy_" not in vars(torch.Tensor)


@pytest.mark.parametrize(("test", "guarded"), [("rank == 0", True), ("is_main_process()", True), ("epoch % 2 == 0", False)])
def test_a_statement_under_a_rank_condition(tmp_path: Path, test: str, guarded: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"def main():\n    if {test}:\n        ema.copy_to(net)\n\nif __name__ == '__main__':\n    main()\n")
    assert overwrites._is_guarded((str(path), 3, "main")) is guarded and not overwrites._is_guarded((str(path), 6, "<module>"))


def test_arguments_may_be_named(told: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    p = weights(monkeypatch)
    p.data.copy_(other=torch.ones(3))
    S.steps = 2
    torch._foreach_copy_(self=[p.data], src=[torch.full((3,), 2.0)])
    with pytest.raises(TypeError):
        p.data.copy_()
    assert len(told) == 2 and p.tolist() == [2.0, 2.0, 2.0]


HANDLED: dict[Any, Any] = {torch.Tensor.copy_: "before"}  # made before anything is watched


class Logged(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked.append((HANDLED.get(func), func is torch.Tensor.copy_, func == torch.Tensor.copy_))
        return super().__torch_function__(func, types, args, kwargs or {})


asked: list[Any] = []


@pytest.mark.usefixtures("told")
def test_a_table_of_functions_knows_it() -> None:
    asked.clear()
    assert "copy_" in vars(torch.Tensor)
    value = torch.zeros(3).as_subclass(Logged)
    value.copy_(torch.ones(3))
    torch.zeros(3).copy_(value)
    late = {torch.Tensor.copy_: "late"}
    copies.leave("test")
    assert asked == [("before", True, True)] * 2 and late[torch.Tensor.copy_] == "late"


@pytest.mark.usefixtures("told")
def test_a_lazy_module_is_loaded_from_a_lazy_one() -> None:
    torch.nn.LazyLinear(3).load_state_dict(torch.nn.LazyLinear(3).state_dict())
    assert digests.address(torch.nn.LazyLinear(3).weight) == 0


@pytest.mark.usefixtures("told")
def test_it_passes_for_the_one_of_torch() -> None:
    copied = pickle.loads(pickle.dumps((torch.Tensor.copy_, torch._foreach_copy_)))
    assert copied == (torch.Tensor.copy_, torch._foreach_copy_) and torch.zeros(1).copy_.__name__ == "copy_"
    assert torch.overrides.is_tensor_method_or_property(torch.Tensor.copy_) and inspect.isroutine(torch.Tensor.copy_)
