"""OPT144: what is said of a reference that is a shallow copy."""

from __future__ import annotations

import pytest

from harness.checks.opt.shared_reference import ReferenceSharesWeights
from harness.model import Severity
from tests.unit.checks.builder import event, findings, recording, row, run, site


def test_a_shallow_copy_as_reference() -> None:
    made = site(31, "reference = copy.copy(policy).eval()")
    told = event("shared_reference", site=made, called=site(71), module="Causal", num=7, steps=4)
    (found,) = findings(ReferenceSharesWeights, run([recording([told], [row(0)], rank=r) for r in (0, 1)]))
    assert found.where is not None and (found.where.line, found.severity, found.ranks) == (31, Severity.WARNING, (0, 1))
    assert "7 parameters" in found.notes[0] and "train.py:71" in found.notes[1]
    assert findings(ReferenceSharesWeights, run([recording([], [row(0)], rank=r) for r in (0, 1)])) == []


@pytest.mark.parametrize(
    ("made", "called", "severity"),
    [
        ("quiet = copy.copy(base)", "hard = F.cross_entropy(quiet(x), target)", Severity.ADVICE),  # the present weights by a second name
        ("return copy.copy(model)", "ref_logits = model(ids)", Severity.ADVICE),
        ("self.ref_model = copy.copy(model)", "return net(ids)", Severity.WARNING),
        ("return copy.copy(model)", "wanted = self.teacher(x)", Severity.WARNING),
        ("anchor = copy.copy(net)", "", Severity.WARNING),
    ],
)
def test_advice_where_no_name_says_that_it_is_a_reference(made: str, called: str, severity: Severity) -> None:
    told = event("shared_reference", site=site(31, made), called=site(71, called), module="Causal", num=7, steps=4)
    (found,) = findings(ReferenceSharesWeights, run([recording([told], [row(0)])]))
    assert found.severity is severity
