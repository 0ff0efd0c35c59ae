"""Losses that were summed over the ranks in place and divided by their number: in the graph, and in the source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.probe import unseensums

torch = pytest.importorskip("torch")
F = torch.nn.functional
RANKS = 2


def out() -> Any:
    return torch.nn.Linear(3, 3)(torch.ones(6, 3))


def mse() -> Any:
    return F.mse_loss(out(), torch.zeros(6, 3))


class Reduce(torch.autograd.Function):  # type: ignore[misc, name-defined]
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def side(reduced: Callable[[], Any], then: Callable[[Any], Any] = lambda t: t) -> str:
    tensor = reduced()
    keys = {unseensums.key_of(tensor.grad_fn)}
    return unseensums.side(then(tensor), keys, RANKS)


def off_diagonal(c: Any) -> Any:
    return (torch.diagonal(c) - 1).pow(2).sum() + 0.02 * (c - torch.diag(torch.diagonal(c))).pow(2).sum()


def test_the_division_alone_is_seen() -> None:
    assert side(lambda: mse() / RANKS) == "before"
    assert side(lambda: mse() * (1 / RANKS)) == "before"
    assert side(mse, lambda t: t.div_(RANKS)) == "after"
    assert side(mse, lambda t: t / RANKS * 0.3) == "after"
    assert side(lambda: out().t() @ out() / 6 / RANKS, off_diagonal) == "before"
    assert side(lambda: out().t() @ out(), lambda c: off_diagonal(c / RANKS)) == "after"


HEALTHY: dict[str, Callable[[], str]] = {
    "not divided: only the value changes": lambda: side(mse),
    "divided by another number": lambda: side(lambda: mse() / 3, lambda t: t / 5),
    "multiplied again": lambda: side(mse, lambda t: t / RANKS * RANKS),
    "a part that is the rank's own": lambda: side(lambda: mse() / RANKS, lambda t: t + mse()),
    "statistics of all ranks beside the rank's own samples": lambda: side(lambda: out().mean(0) / RANKS, lambda m: (out() - m).pow(2).mean()),
    "a collective with a gradient above": lambda: side(lambda: mse() / RANKS, Reduce.apply),
    "a copy": lambda: unseensums.side(mse(), {unseensums.key_of(mse().detach().requires_grad_().clone().grad_fn)}, RANKS),
    "divided twice": lambda: side(lambda: mse() / RANKS, lambda t: t / RANKS),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_comes_near(name: str) -> None:
    assert HEALTHY[name]() == ""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (["loss = f(x)", "dist.all_reduce(loss)", "loss.div_(world)"], {"after"}),
        (["loss = f(x)", "dist.all_reduce(loss)", "loss /= dist.get_world_size()"], {"after"}),
        (["loss = f(x)", "dist.all_reduce(loss)", "loss = loss / world"], {"after"}),
        (["dist.all_reduce(c)", "return c / world"], {"after"}),
        (["c = c / dist.get_world_size()", "dist.all_reduce(c)", "return c"], {"before"}),
        (["c = a @ b / len(a) / world", "dist.all_reduce(c)"], {"before"}),
        (["loss = (real + fake) / 2", "dist.all_reduce(loss)", "loss.backward()", "shown = loss.item() / world"], set()),
        (["loss = (real + fake) / 2", "dist.all_reduce(loss)", "loss.backward()", "shown = loss / world"], set()),
        (["loss = f(x) / accumulate", "dist.all_reduce(loss)", "loss.backward()"], set()),
        (["c = c / world", "c = g(c)", "dist.all_reduce(c)"], set()),
    ],
)
def test_where_the_source_divides(body: list[str], expected: set[str], tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def total(x):\n" + "".join(f"    {line}\n" for line in body))
    assert unseensums.sides(str(file), next(i for i, line in enumerate(body) if "all_reduce" in line) + 2) == expected


def test_a_call_that_is_divided(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("loss = summed(loss) / world\nlog(summed(loss), world)\n")
    assert unseensums.divided_at((str(file), 1, "<module>")) and not unseensums.divided_at((str(file), 2, "<module>"))
