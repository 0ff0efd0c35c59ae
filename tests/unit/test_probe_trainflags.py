"""Modes of modules are seen at the step where they were set, and within EVERY steps where that called nothing, at the same steps on all ranks."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import names, trainflags
from harness.probe.state import S

LATE = trainflags.FIRST_STEPS + trainflags.EVERY


@pytest.fixture
def witness(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trainflags, "_tell", lambda witness: None)
    monkeypatch.setattr(trainflags, "is_told", [True])
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


def _hide(module: Any) -> None:
    vars(module)["training"] = False  # calls nothing


def test_later_what_calls_nothing_is_seen_within_some_steps(witness: Any) -> None:
    S.steps = LATE
    before = trainflags.look(witness)
    _hide(witness.model[1][0])
    seen = []
    for S.steps in range(LATE + 1, LATE + trainflags.EVERY + 1):
        seen.append(trainflags.look(witness) != before)
    assert seen == [False] * (trainflags.EVERY - 1) + [True]


@pytest.mark.parametrize("alone_at", range(LATE + 1, LATE + 9))
def test_a_rank_that_reads_in_between_reads_on_at_the_steps_of_all(witness: Any, alone_at: int) -> None:
    for S.steps in range(LATE, alone_at + 1):
        before = trainflags.look(witness)
    trainflags.num_switches[0] += 1  # it alone has evaluated
    assert trainflags.look(witness) == before
    _hide(witness.model[1][0])
    last = alone_at // trainflags.EVERY * trainflags.EVERY + trainflags.EVERY
    for S.steps in range(alone_at + 1, last):
        assert trainflags.look(witness) == before
    S.steps = last
    assert trainflags.look(witness) != before


def test_where_assignments_are_not_seen_modes_are_read_at_every_step(witness: Any) -> None:
    trainflags.is_told[0] = False
    S.steps = LATE
    before = trainflags.look(witness)
    _hide(witness.model[1][0])
    S.steps += 1
    assert trainflags.look(witness) != before


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
