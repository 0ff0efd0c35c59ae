"""What is summed over the ranks between backward and step, against the square of the gradients: told where it is a whole multiple of that alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness.probe import marks
from harness.probe.sensors import gradsquares
from harness.probe.state import S

SITE = ("train.py", 53, "clip")


class Told:
    """Stands for the recorder."""

    errors = 0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, site: Any, /, **fields: Any) -> None:
        self.events.append(fields)


@pytest.fixture
def optimizer(monkeypatch: pytest.MonkeyPatch) -> torch.optim.Optimizer:
    monkeypatch.setattr(S, "recorder", Told())
    monkeypatch.setattr(S, "backwards", 1)
    for name, start in (("_looks", [0]), ("_told", [0]), ("_misses", {}), ("_pending", [])):
        monkeypatch.setattr(gradsquares, name, start)
    model = torch.nn.Linear(3, 2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(marks, "optimizers", lambda: [made])
    return made


def told(optimizer: torch.optim.Optimizer, summed: Any) -> list[dict[str, Any]]:
    gradsquares._note(summed, SITE, "all_reduce")
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(0.5)
    gradsquares._at_step(optimizer, None, None)
    return S.recorder.events  # type: ignore[attr-defined,no-any-return]


def test_a_multiple_of_the_square(optimizer: torch.optim.Optimizer) -> None:
    assert told(optimizer, torch.tensor(16.0)) == [{"got": 16.0, "own": pytest.approx(8.0), "left": pytest.approx(2.0)}]


@pytest.mark.parametrize("summed", [torch.tensor(8.0), torch.tensor(11.3), torch.tensor(16), torch.tensor([16.0, 2.0]), torch.tensor(0.0)])
def test_other_sums(optimizer: torch.optim.Optimizer, summed: torch.Tensor) -> None:
    assert told(optimizer, summed) == []


def test_a_statement_that_sums_something_else_is_left_alone(optimizer: torch.optim.Optimizer) -> None:
    for _ in range(8):
        told(optimizer, torch.tensor(3.3))
    assert gradsquares._looks == [2]
