"""A loss that is fed what it does not want is told once, with what it wants."""

from __future__ import annotations

import pytest
from builder import event, findings, recording, row, run

from harness.checks.opt.misfed_loss import MisfedLoss


@pytest.mark.parametrize(("loss", "fed", "message"), [
    ("cross_entropy", "SoftmaxBackward0", "cross_entropy is given the probabilities of a softmax, and wants scores"),
    ("nll_loss", "AddmmBackward0", "nll_loss is given raw scores, and wants log-probabilities"),
    ("of another version", "AddmmBackward0", None),
])  # fmt: skip
def test_what_is_told(loss: str, fed: str, message: str | None) -> None:
    told = [event("loss", line=20), event("misfed_loss", line=20, loss=loss, fed=fed), event("misfed_loss", line=24, loss=loss, fed=fed)]
    found = findings(MisfedLoss, run([recording(told, [row(0)], rank=r) for r in range(2)]))
    assert [(f.message, f.where.line, f.ranks) for f in found if f.where] == ([(message, 20, (0, 1))] if message else [])
