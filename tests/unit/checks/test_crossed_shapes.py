"""OPT137: what the probe saw of a loss of all pairs is told once."""

from __future__ import annotations

from builder import event, findings
from replica_runs import two_ranks

from harness.checks.opt.crossed_shapes import LossOfAllPairs


def test_told() -> None:
    loss = event("loss", line=60, reduction="mean", scaled=False, root=["MeanBackward0"])
    told = event("crossed", line=44, rows=18, predicted=[18, 1], target=[18])
    (found,) = findings(LossOfAllPairs, two_ranks(extra=lambda rank: [loss, told]))
    assert found.where is not None and found.where.line == 44 and "18 x 18" in found.message
    assert not findings(LossOfAllPairs, two_ranks(extra=lambda rank: [loss]))
