"""OPT144: what is said of a reference that is a shallow copy."""

from __future__ import annotations

from harness.checks.opt.shared_reference import ReferenceSharesWeights
from harness.model import Severity
from tests.unit.checks.builder import event, findings, recording, row, run, site


def test_a_shallow_copy_as_reference() -> None:
    told = event("shared_reference", line=31, called=site(71), module="Causal", num=7, steps=4)
    (found,) = findings(ReferenceSharesWeights, run([recording([told], [row(0)], rank=r) for r in (0, 1)]))
    assert found.where is not None and (found.where.line, found.severity, found.ranks) == (31, Severity.WARNING, (0, 1))
    assert "7 parameters" in found.notes[0] and "train.py:71" in found.notes[1]
    assert findings(ReferenceSharesWeights, run([recording([], [row(0)], rank=r) for r in (0, 1)])) == []
