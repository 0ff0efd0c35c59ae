"""Folding: one cause, one finding."""

from __future__ import annotations

import pytest
from builder import event, recording, run

from harness.checks.engine import fold, judge
from harness.checks.opt.clip_scaled import ClipWithoutUnscale
from harness.model import Finding, OutcomeKind, Severity


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


def test_a_value_that_no_sensor_writes_leaves_its_check_inconclusive_and_the_run_damaged() -> None:
    forged = [event("clip", line=3, scaled=True, scale="much", norm=[], max_norm=1.0)]
    outcomes, findings = judge(run([recording(forged, rank=rank, world_size=2) for rank in (0, 1)]))
    kinds = {o.code: o.kind for o in outcomes}
    assert kinds["OPT110"] is OutcomeKind.INCONCLUSIVE and OutcomeKind.CRASHED not in kinds.values()
    (told,) = [f for f in findings if f.code == "LAU125"]
    assert told.severity is Severity.ADVICE and told.notes[0].startswith("OPT110: ValueError") and "clip_scaled.py" in told.notes[0]


def test_a_check_that_breaks_for_another_reason_has_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ClipWithoutUnscale, "end", broken)
    outcomes, findings = judge(run([recording([], rank=0, world_size=1)]))
    assert [o.code for o in outcomes if o.kind is OutcomeKind.CRASHED] == ["OPT110"] and "LAU125" not in {f.code for f in findings}
