"""Modes of modules are seen at the step where train() or eval() was called, and within EVERY steps where `.training` was assigned."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import names, trainflags
from harness.probe.state import S

LATE = trainflags.FIRST_STEPS + 1


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trainflags, "_tell", lambda witness: None)
    monkeypatch.setattr(S, "steps", 0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(2)))
    return SimpleNamespace(modules=trainflags.Modules(), roots=[weakref.ref(model)], flags=0, model=model)


@pytest.mark.parametrize("step", [1, trainflags.FIRST_STEPS - 1])
def test_at_the_first_steps_an_assignment_is_seen_at_once(witness: Any, step: int) -> None:
    S.steps = step - 1
    before = trainflags.look(witness)
    witness.model[1][0].training = False
    S.steps = step
    assert trainflags.look(witness) != before


def test_later_an_assignment_is_seen_within_some_steps(witness: Any) -> None:
    S.steps = LATE
    before = trainflags.look(witness)
    witness.model[1][0].training = False
    seen = []
    for S.steps in range(LATE + 1, LATE + trainflags.EVERY + 1):
        seen.append(trainflags.look(witness) != before)
    assert seen == [False] * (trainflags.EVERY - 1) + [True]


def test_later_a_switch_is_seen_at_once(witness: Any) -> None:
    S.steps = LATE
    before = trainflags.look(witness)
    witness.model.eval()
    trainflags.num_switches[0] += 1  # modes.py counts the calls
    S.steps += 1
    assert trainflags.look(witness) != before
    witness.model.train()
    trainflags.num_switches[0] += 1
    S.steps += 1
    assert trainflags.look(witness) == before


def test_a_module_that_was_put_in_is_seen(witness: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    S.steps = LATE
    before = trainflags.look(witness)
    witness.model.append(torch.nn.ReLU().eval())
    monkeypatch.setattr(names, "num_made", [names.num_made[0] + 1])  # modes.py counts the modules
    S.steps += 1
    assert trainflags.look(witness) != before


def test_a_module_that_was_made_long_ago_is_seen_at_the_next_walk(witness: Any) -> None:
    spare = torch.nn.ReLU().eval()
    S.steps = LATE
    before = trainflags.look(witness)
    witness.model.append(spare)
    for S.steps in range(LATE + 1, LATE + trainflags.WALK_EVERY + trainflags.EVERY):
        now = trainflags.look(witness)
    assert now != before


def test_nothing_is_kept_alive(witness: Any) -> None:
    trainflags.look(witness)
    gone = weakref.ref(witness.model)
    witness.model = None
    assert gone() is None
    S.steps = LATE
    assert trainflags.look(witness) != 0
