"""By which numbers a loss is multiplied and divided, and over what it is reduced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from harness.probe import ownmeans, roots

ROWS, CLASSES = 8, 4
net = torch.nn.Linear(3, CLASSES)
x, y = torch.randn(ROWS, 3), torch.arange(ROWS) % CLASSES
Make = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("make", "terms"),
    [
        (lambda o: F.mse_loss(o, o.detach() + 1, reduction="sum") / len(o), [(1, 1 / ROWS, False, (ROWS, CLASSES))]),
        (lambda o: F.cross_entropy(o, y, reduction="sum") / 16, [(1, 1 / 16, False, (ROWS,))]),
        (lambda o: F.cross_entropy(o, y) / 4, [(1, 1 / 4, True, (ROWS,))]),
        (lambda o: F.cross_entropy(o, y, label_smoothing=0.1) / 4, [(1, 1 / 4, True, (ROWS,))]),
        (lambda o: F.kl_div(o.log_softmax(1), o.detach().softmax(1), reduction="batchmean"), [(1, 1 / ROWS, False, (ROWS, CLASSES))]),
        (lambda o: F.cross_entropy(o, y, reduction="none").mul(0.5).sum(), [(1, 0.5, False, (ROWS,))]),
        (lambda o: (o.pow(2).mean(1) / 2).sum() / ROWS, [(1, 0.5 / ROWS, False, (ROWS,))]),
        (lambda o: (F.cross_entropy(o, y, reduction="none") * torch.arange(ROWS)).sum() / ROWS, []),  # weights, or a mask: another count
        (lambda o: F.cross_entropy(o, torch.where(y == 0, -100, y), reduction="sum") / ROWS, []),  # some are left out
        (lambda o: F.cross_entropy(o, y, weight=torch.arange(CLASSES) + 0.5, reduction="sum") / ROWS, []),
        (lambda o: F.cross_entropy(o, y) - 0.1 * o.pow(2).mean(), [(1, 1, True, (ROWS,)), (1, 0.1, True, (ROWS, CLASSES))]),
        (lambda o: (F.cross_entropy(o, y) + 2 * o.mean()) / 2, [(0.5, 1, True, (ROWS,)), (0.5, 2, True, (ROWS, CLASSES))]),
        (lambda o: sum([0.3 * F.cross_entropy(o, y), 0.7 * F.cross_entropy(o, y)]), [(1, 0.3, True, (ROWS,)), (1, 0.7, True, (ROWS,))]),
        (lambda o: -o.sum(1).mean(), [(1, 1, True, (ROWS,))]),
        (lambda o: F.cross_entropy(o, y) * o.mean(), []),  # a product of two parts of the graph
        (lambda o: sum(o.mean() for _ in range(roots.MAX_TERMS + 1)), []),  # more terms than are read
    ],
)
def test_the_terms_of_a_loss(make: Make, terms: list[tuple[float, float, bool, tuple[int, ...]]]) -> None:
    assert [tuple(t) for t in ownmeans.terms_of(make(net(x)))] == [(pytest.approx(a), pytest.approx(b), mean, sizes) for a, b, mean, sizes in terms]


def test_label_smoothing_is_no_factor_of_the_script() -> None:
    assert roots.root_of(F.cross_entropy(net(x), y, label_smoothing=0.1))[1:] == ("mean", False)
    assert roots.root_of(F.cross_entropy(net(x), y, label_smoothing=0.1) / 2)[1:] == ("mean", True)
