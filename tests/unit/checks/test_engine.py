"""Folding: one cause, one finding."""

from __future__ import annotations

from harness.checks.engine import fold
from harness.model import Finding, Severity


def found(code: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(code, code.lower(), severity, "message", None, (), (), "", {})


def test_a_consequence_is_folded_under_its_cause() -> None:
    (kept,) = fold([found("SYN127"), found("SYN101")])
    assert kept.code == "SYN101" and kept.consequences == ("SYN127",)


def test_any_error_explains_a_loss_that_does_not_fall() -> None:
    (kept,) = fold([found("OPT113"), found("SYN103")])
    assert kept.code == "SYN103" and kept.consequences == ("OPT113",)
    assert {f.code for f in fold([found("OPT113"), found("PRF101", Severity.WARNING)])} == {"OPT113", "PRF101"}
    assert [f.code for f in fold([found("OPT113")])] == ["OPT113"]
