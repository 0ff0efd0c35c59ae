"""By which numbers a loss is divided, read from its graph; what in the source may make up for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from harness.probe import makeups, quotients

COUNT = torch.tensor(12.0)


def look(loss: torch.Tensor) -> list[quotients.Quotient] | None:
    return quotients.look(loss, lambda tensor: tensor is COUNT)


def out() -> torch.Tensor:
    return torch.nn.Linear(3, 4)(torch.ones(6, 3))


def test_quotients_of_a_sum() -> None:
    found = look(5 * (out().abs().sum() / COUNT) + F.mse_loss(out(), torch.zeros(6, 4), reduction="sum") / 12)
    assert [(q.value, q.same, q.above, q.mean) for q in found or ()] == [(12.0, False, (), False), (12.0, True, (5.0,), False)]


def test_factors_under_and_over_it() -> None:
    (one,) = look(2 * out().abs().sum() / COUNT) or ()
    assert one.above == () and one.below == (2.0,)
    (one,) = look((out().abs() / COUNT).sum() * 2) or ()
    assert one.above == (2.0,) and one.same
    (one,) = look(out().abs().mean() / COUNT) or ()
    assert one.mean


def test_two_quotients_on_one_way() -> None:
    outer, inner = look(out().sum() / COUNT / 0.5) or ()
    assert (outer.value, inner.value) == (0.5, 12.0) and inner.above == (2.0,)


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def test_what_cannot_be_read() -> None:
    assert look(Reduce.apply(out().sum()) / COUNT) is None
    long = out().sum()
    for _ in range(300):
        long = long + 1
    assert look(long / COUNT) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert look(out().sum() / COUNT) == []  # somebody else's hook would have to bring it back


def test_the_backward_still_works() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum() / COUNT
    look(loss)
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == pytest.approx([2 / 12] * 3)


@pytest.mark.parametrize(
    ("line", "made_up"),
    [
        ("opt = SGD(p, lr=args.lr * world_size)", True),
        ("opt = SGD(p, lr=0.1 * dist.get_world_size())", True),
        ("rate = {'lr': scaled(0.1, world_size)}", True),
        ("lr *= dist.get_world_size()", True),
        ("p.register_hook(lambda g: g * 2)", True),
        ("opt = SGD(p, lr=0.1)", False),
        ("batch = args.batch * world_size", False),
    ],
)
def test_made_up(line: str, made_up: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(line + "\n")
    assert makeups.made_up(str(file)) == made_up


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (["n = valid.sum()", "dist.all_reduce(n)"], False),
        (["n = valid.sum() / world_size", "dist.all_reduce(n)"], True),
        (["n = valid.sum()", "dist.all_reduce(n.div_(dist.get_world_size()))"], True),
        (["per_rank = batch // world_size", "dist.all_reduce(n)"], False),
        (["dist.all_reduce(n)", "n = n / world_size"], False),  # the values say it
    ],
)
def test_predivided(body: list[str], expected: bool, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def total(n, valid):\n" + "".join(f"    {line}\n" for line in body))
    at = next(i for i, line in enumerate(body) if "all_reduce" in line)
    assert makeups.predivided([(str(file), at + 2, "total")]) == expected
    assert makeups.predivided([(str(file), at + 2, "reduce_mean")])
