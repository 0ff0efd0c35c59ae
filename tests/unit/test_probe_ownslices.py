"""A gather's own backward: whether what it gives back is the rank's own part of what it was given."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness.probe.sensors import ownslices
from harness.probe.state import S


class Told:
    """Stands for the recorder."""

    disabled = False
    errors = 0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, site: Any, /, **fields: Any) -> None:
        self.events.append({"kind": kind, "line": site[1]} | fields)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    recorder = Told()
    monkeypatch.setattr(S, "recorder", recorder)
    monkeypatch.setattr(ownslices, "_told", set())
    monkeypatch.setattr(ownslices, "_is_scaled", lambda: False)
    monkeypatch.setattr("harness.probe.sites.is_user_code", lambda code: True)
    yield recorder


def in_place(grad: Any) -> Any:
    """As all_reduce does."""
    grad.mul_(2)
    return grad[2:4]


def gathered(backward: Callable[[Any], Any], parts: bool = False) -> Any:
    """A loss over the rows of two ranks, of which this is the second."""

    class Gather(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return (torch.ones(2, 3), x.clone()) if parts else torch.cat([torch.ones(2, 3), x])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(grads if parts else grads[0])

    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    made = Gather.apply(x * 1)
    return ((torch.cat(made) if parts else made) ** 2).sum()


@pytest.mark.parametrize(("backward", "parts", "found"), [
    (lambda g: g[2:4], False, True),
    (lambda g: g.clone().chunk(2)[1], False, True),
    (lambda g: g[1], True, True),
    (lambda g: g[0], True, False),  # another rank's
    (lambda g: 2 * g[2:4], False, False),  # multiplied by the number of ranks
    (in_place, False, False),  # reduced where it lay
    (lambda g: g[:2], False, False),
])  # fmt: skip
def test_the_own_part_of_a_gradient(told: Told, backward: Callable[[Any], Any], parts: bool, found: bool) -> None:
    loss = gathered(backward, parts)
    (node,) = ownslices._functions(loss.grad_fn)
    ownslices._watch(node, 1, 2)
    loss.backward()
    assert [(e["function"], e["parts"], e["numel"]) for e in told.events] == [("Gather", 2, 6)] * found
    assert told.errors == 0


@pytest.mark.parametrize(("statement", "found"), [
    ("loss = loss * dist.get_world_size()", True),
    ("loss *= world_size", True),
    ("grad.mul_(world_size)", True),
    ("lr = 0.1 * world_size", True),
    ("parts = [zeros] * dist.get_world_size()", False),
    ("start = dist.get_rank() * n", False),
    ("loss = loss / world_size", False),
])  # fmt: skip
def test_what_is_multiplied_by_the_number_of_ranks(statement: str, found: bool) -> None:
    tree = ast.parse(statement)
    assert any(ownslices._multiplies(n, tree, (("train.py", tree),)) for n in ast.walk(tree)) == found
