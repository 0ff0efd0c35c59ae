"""When a wrapped model is looked at for changes, and that a mode which is assigned counts as a switch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.probe import trainflags
from harness.probe.recorder import Recorder
from harness.probe.sensors import ddp, edits, steps
from harness.probe.state import S


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    for owner, name in ((torch.nn.Module, "__setattr__"), (torch.nn.Module, "add_module"), (torch.nn.Module, "register_parameter")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(torch.nn.Module, "register_module", torch.nn.Module.register_module)
    monkeypatch.setattr(edits, "_watching", [False])
    monkeypatch.setattr(trainflags, "is_told", [False])
    monkeypatch.setattr(S, "recorder", Recorder(str(tmp_path), "main"))
    monkeypatch.setattr(S, "steps", 0)
    edits.watch()


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[ddp.Wrapped]:
    monkeypatch.setattr(S, "recorder", Recorder(str(tmp_path), "main"))
    monkeypatch.setattr(S, "steps", 0)
    outer = torch.nn.Module()
    outer.module = torch.nn.Linear(2, 2)
    outer.require_backward_grad_sync = True  # type: ignore[assignment]
    yield ddp.Wrapped(outer, 0)
    S.recorder.forget()


@pytest.mark.usefixtures("watched")
def test_a_mode_that_is_assigned_is_a_switch_and_a_module_that_is_put_in_an_edit() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    edits.num_edits[0] = trainflags.num_switches[0] = trainflags.num_placed[0] = 0
    net[1].training = False
    assert (trainflags.num_switches[0], trainflags.num_placed[0]) == (1, 0)
    net.train()
    assert trainflags.num_switches[0] == 4
    net[0] = torch.nn.Linear(2, 2)
    assert trainflags.num_placed[0] and edits.num_edits[0]


def _due(wrapped: ddp.Wrapped, number: int) -> list[int]:
    first = wrapped.num_entered + 1
    return [num for num in range(first, first + number) if ddp._is_due(wrapped)]


def test_a_wrapped_model_is_looked_at_at_first_and_now_and_then(wrapped: ddp.Wrapped) -> None:
    assert _due(wrapped, 100) == [*range(1, 9), 16, 24, 32, 40, 48, 56, 64, 80, 96]


def test_and_before_it_is_called_behind_an_edit(wrapped: ddp.Wrapped) -> None:
    assert _due(wrapped, 9)[-1] == 8
    edits.num_edits[0] += 1
    assert _due(wrapped, 5) == [10]
    _due(wrapped, 60)
    edits.num_edits[0] += 1  # by then a long run
    assert _due(wrapped, 3) == []


def test_what_requires_grad_is_set_by_a_call_for_a_parameter_not_for_an_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(S, "ddps", [object()])
    monkeypatch.setattr(edits, "of_flags", [])
    before = edits.num_edits[0]
    edits._note_flag(torch.ones(2))
    assert edits.num_edits[0] == before and not edits.of_flags
    edits._note_flag(torch.nn.Parameter(torch.ones(2)))
    assert edits.num_edits[0] == before + 1 and len(edits.of_flags) == 1


def test_a_forward_that_raises_is_looked_at(wrapped: ddp.Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen since the last look, and no gradient went away: zero_grad(set_to_none=False)."""

    def fail(model: Any, *args: Any) -> None:
        raise RuntimeError("Expected to have finished reduction in the prior iteration")

    looked: list[Any] = []
    monkeypatch.setattr(ddp, "_look_for_changes", lambda wrapped, model, site: looked.append(model))
    wrapped.num_entered, wrapped.num_edits = 9, edits.num_edits[0]
    model = wrapped.ref()
    monkeypatch.setattr(S, "ddps", [wrapped])
    forward = ddp._forward(fail)
    with pytest.raises(RuntimeError, match="prior iteration"):
        forward(model, torch.ones(1, 2))
    assert looked == [model]


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    monkeypatch.setattr(S, "recorder", Recorder(str(tmp_path), "main"))
    monkeypatch.setattr(S, "steps", 0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.model = model  # type: ignore[attr-defined]
    yield made
    S.recorder.forget()
    steps._known.clear()


def _stepped(optimizer: Any) -> None:
    steps.before_step(optimizer, (optimizer,), {})
    steps.after_step(optimizer, (optimizer,), {})


def test_gradients_of_other_parameters_than_before_are_a_sign_of_an_edit(optimizer: Any) -> None:
    def edited(layer: int) -> bool:
        before = edits.num_edits[0]
        optimizer.zero_grad()
        optimizer.model[layer](torch.ones(1, 2)).sum().backward()
        _stepped(optimizer)
        return edits.num_edits[0] != before

    assert [edited(0) for _ in range(3)] == [True, False, False]
    assert [edited(1) for _ in range(3)] == [True, False, False]


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("step", [70, 300])
def test_parameters_that_were_put_in_the_place_of_others_are_learnt_at_once(optimizer: Any, place: int, step: int) -> None:
    witness = steps.Witness(optimizer)
    witness.num_reads, S.steps = steps.FIRST_READS + 1, step
    new = torch.nn.Parameter(torch.ones(2))
    optimizer.param_groups[0]["params"][place] = new
    assert any(p is new for p in witness.read(optimizer))
    assert any(ref() is new for ref in witness.refs)


def test_an_optimizer_that_is_emptied_and_filled_anew_is_learnt(optimizer: Any) -> None:
    witness = steps.Witness(optimizer)
    witness.num_reads = steps.FIRST_READS + 1
    held = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = []
    assert witness.read(optimizer) == []
    optimizer.param_groups[0]["params"] = held
    assert {id(p) for p in witness.read(optimizer)} == set(map(id, held))


def test_hyperparameters_in_a_list_that_is_written_to_are_others(optimizer: Any) -> None:
    witness = steps.Witness(optimizer)
    group = optimizer.param_groups[0]
    group["betas"] = [0.9, 0.99]
    before = steps._hyper(optimizer, witness)
    assert steps._hyper(optimizer, witness) == before
    group["betas"][0] = 0.8
    assert steps._hyper(optimizer, witness) != before


def test_what_ddp_was_told_to_ignore_it_does_not_cover(wrapped: ddp.Wrapped, monkeypatch: pytest.MonkeyPatch) -> None:
    module = wrapped.ref().module
    wrapped.ignored.add("bias")
    monkeypatch.setattr(S, "ddps", [wrapped])
    assert [ddp.wrap_of(p) for p in (module.weight, module.bias)] == [0, -1]
    assert wrapped.knows(module.bias)
