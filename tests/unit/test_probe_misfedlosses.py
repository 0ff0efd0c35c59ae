"""Which operation made what a classification loss is fed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from harness.probe.sensors import misfedlosses

X, Y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
HEAD = nn.Linear(4, 3)
WORDS, LETTERS = torch.randn(5, 2, 4), torch.tensor([[1, 2], [2, 1]])
HARD, ONES = F.one_hot(Y, 3).float(), torch.ones(6, 3)


def by_hand(scores: Any) -> Any:
    return 0.3 * (F.nll_loss(scores, Y, reduction="none") + scores.logsumexp(1)).mean()


CASES: dict[str, tuple[Any, tuple[str, str] | None]] = {
    "scores": (lambda: F.cross_entropy(HEAD(X), Y), None),
    "a softmax": (lambda: F.cross_entropy(HEAD(X).softmax(1), Y), ("cross_entropy", "SoftmaxBackward0")),
    "in shape": (
        lambda: F.cross_entropy(HEAD(X).softmax(1).view(2, 3, 3).transpose(1, 2), Y.view(2, 3)),
        ("cross_entropy", "SoftmaxBackward0"),
    ),
    "soft labels": (lambda: F.cross_entropy(HEAD(X).softmax(1), HARD), ("cross_entropy", "SoftmaxBackward0")),
    "the second of two": (
        lambda: 0.5 * F.mse_loss(HEAD(X), HARD) + F.cross_entropy(HEAD(X).softmax(1), Y),
        ("cross_entropy", "SoftmaxBackward0"),
    ),
    "log_softmax twice changes nothing": (lambda: F.cross_entropy(HEAD(X).log_softmax(1), Y), None),
    "a temperature": (lambda: F.cross_entropy(HEAD(X).softmax(1) / 0.07, Y), None),
    "attention below": (lambda: F.cross_entropy(HEAD(X @ (X.t() @ HEAD(X)).softmax(1) @ HEAD.weight), Y), None),
    "a sigmoid": (lambda: F.binary_cross_entropy_with_logits(HEAD(X).sigmoid(), ONES), ("binary_cross_entropy_with_logits", "SigmoidBackward0")),
    "a gate": (lambda: F.binary_cross_entropy_with_logits(HEAD(X).sigmoid() * HEAD(X), ONES), None),
    "probabilities": (lambda: F.binary_cross_entropy(HEAD(X).sigmoid(), ONES), None),
    "log-probabilities": (lambda: F.nll_loss(HEAD(X).log_softmax(1), Y), None),
    "a mixture": (lambda: F.nll_loss(HEAD(X).softmax(1).log(), Y), None),
    "raw scores": (lambda: F.nll_loss(HEAD(X), Y), ("nll_loss", "AddmmBackward0")),
    "paths through a tree": (lambda: F.nll_loss(F.logsigmoid(HEAD(X)) @ torch.ones(3, 4), Y), None),
    "turned paths": (lambda: F.nll_loss((torch.ones(4, 3) @ F.logsigmoid(HEAD(X)).t()).t(), Y), None),
    "cross entropy by hand": (lambda: by_hand(HEAD(X)), None),
    "a partition function": (lambda: F.nll_loss(s := HEAD(X), Y, reduction="sum") + (2 * s.relu().cumsum(1)).logsumexp(1).sum(), None),
    "a penalty on the logsumexp": (lambda: F.nll_loss(s := HEAD(X), Y) + s.logsumexp(1).pow(2).mean(), ("nll_loss", "AddmmBackward0")),
    "the logsumexp of others": (lambda: F.nll_loss(HEAD(X), Y) + HEAD(X).logsumexp(1).mean(), ("nll_loss", "AddmmBackward0")),
    "scores of a sequence": (lambda: F.ctc_loss(HEAD(WORDS), LETTERS, (5, 5), (2, 2)), ("ctc_loss", "AddmmBackward0")),
    "a sequence": (lambda: F.ctc_loss(HEAD(WORDS).log_softmax(-1), LETTERS, (5, 5), (2, 2)), None),
    "distillation": (lambda: F.kl_div(HEAD(X).log_softmax(1), HARD, reduction="batchmean"), None),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_loss_is_fed(name: str) -> None:
    make, wanted = CASES[name]
    assert misfedlosses.misfed(make().grad_fn) == wanted
