"""Losses in which predictions meet the targets of all other samples, and such that mean it or do not."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from harness.probe import crossed, cuts, sites

N = 6
net = torch.nn.Linear(3, 1)
x, y = torch.randn(N, 3), torch.rand(N)
BATCH = [((N, 3), True), ((N,), True)]


def found(loss: Any, shapes: Any = BATCH) -> Any:
    return crossed.found(loss.grad_fn, shapes)


def test_crossed() -> None:
    assert found((y - net(x)).square().mean()) == ((N, 1), (N,))
    assert found(torch.maximum(0.1 * (net(x).sigmoid() - y), -y).mean()) == ((N, 1), (N,))
    column = [((N, 3), True), ((N, 1), True)]
    assert found((net(x).squeeze(1) - y[:, None]).abs().sum(), column) == ((N,), (N, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert found(F.mse_loss(net(x), y)) == ((N, 1), (N,))


def test_not_crossed() -> None:
    assert found((y - net(x).squeeze(1)).square().mean()) is None
    assert found((y[:, None] - net(x)).square().mean()) is None
    assert found((net(x) - net(x).squeeze(1)).square().mean()) is None  # pairs of predictions: both carry a gradient
    assert found((net(x).squeeze(1).unsqueeze(1) - y).square().mean()) is None  # an axis that was made
    assert found((y - x @ x.T - net(x).mean(0)).square().mean()) is None  # a kernel
    assert found((y - net(x)).square().mean(), [((N, N), True), ((N,), True)]) is None  # a matrix of the batch's own
    assert found((y - net(x)).square().mean(), [((N, 3), True), ((N, 1), True)]) is None  # the batch's targets have the axis
    assert found((y - net(x)).square().mean(), [((N, 3), True), ((N,), False)]) is None  # classes
    assert found((y - torch.nn.Linear(3, N)(x)).square().mean()) is None  # quantiles, as many as samples


def test_pairs_that_are_meant() -> None:
    difference = net(x) - y
    assert found(F.cross_entropy(-difference.square(), torch.arange(N))) is None
    assert found(difference.square().neg().logsumexp(1).mean()) is None
    assert found(difference.abs().min(1).values.mean()) is None
    assert found(difference.square().sum(1).log().mean()) is None
    assert found(difference.square().triu(1).mean()) is None
    assert found(difference.square().sum(1).mean()) == ((N, 1), (N,))  # as good as one sum of all
    assert found(difference.square().mean().sqrt()) == ((N, 1), (N,))


LOSS = "def pinball(pred, target):\n    error = target - pred\n    return error.abs().mean()\n\n\n"
STEP = "def train(model, loader):\n    for x, y in loader:\n        loss = pinball(model(x), y)\n        loss.backward()\n"


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        (LOSS + STEP, False),
        (
            "class Net:\n    def forward(self, x):\n        return self.head(x.view(2, -1))\n\n\n" + LOSS + STEP,
            False,
        ),  # no part of the loss
        (LOSS.replace("target - pred", "target[None] - pred") + STEP, True),
        (LOSS.replace("target - pred", "target - pred.T") + STEP, True),
        (LOSS + STEP.replace("pinball(model(x), y)", "pinball(model(x), y.view(1, -1))"), True),
        (LOSS + "def rows(t):\n    return t.unsqueeze(0)\n\n\n" + STEP.replace("(x), y)", "(x), rows(y))"), True),
        ("class PairLoss:\n    def forward(self, p, t):\n        return torch.cdist(p, t)\n\n\n" + LOSS + STEP, True),
    ],
)
def test_where_nothing_makes_an_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, meant: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    monkeypatch.setattr(cuts, "user_files", lambda: [str(path)])
    at: sites.Site = (str(path), len(source.splitlines()), "train")
    place = crossed.unmeant([at])
    assert place is None if meant else place is not None and "target - pred" in sites.text(place)
