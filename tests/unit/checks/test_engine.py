"""Folding: one cause, one finding."""

from __future__ import annotations

import pytest
from builder import event, recording, row, run

from harness.checks.engine import explained_by, fold, judge
from harness.checks.opt.clip_scaled import ClipWithoutUnscale
from harness.checks.registry import all_checks
from harness.model import Finding, OutcomeKind, Severity


def found(code: str, severity: Severity = Severity.ERROR) -> Finding:
    return Finding(code, code.lower(), severity, "message", None, (), (), "", {})


def test_a_consequence_is_folded_under_its_cause() -> None:
    (kept,) = fold([found("SYN127"), found("SYN101")])
    assert kept.code == "SYN101" and kept.consequences == ("SYN127",)


def test_a_single_finding_may_explain_more_than_its_check() -> None:
    by_it = Finding("OUT103", "n", Severity.ERROR, "message", consequences=("LAU101", "HNG*"))
    kept = fold([found("OUT103", Severity.ADVICE), by_it, found("LAU101")])
    assert [(f.code, f.severity, f.consequences) for f in kept] == [("OUT103", Severity.ERROR, ("LAU101",)), ("OUT103", Severity.ADVICE, ())]


def test_which_finding_says_what_a_suspect_said() -> None:
    assert explained_by("DAT102", [found("OPT101"), found("DAT107")]) == "DAT107"
    assert explained_by("DAT107", [found("DAT102")]) is None


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


@pytest.mark.parametrize(("lost", "steps", "sane"), [(127, 1, False), (1, 127, True), (0, 8, True)])
def test_a_run_that_the_probe_lost_most_of_is_not_called_sane(lost: int, steps: int, sane: bool) -> None:
    told = [event("probe_error", where="after_step", error="RuntimeError('x')"), event("end", how="exit", code=0, steps=steps, lost_steps=lost)]
    made = [recording(told, [row(step) for step in range(steps)], rank=rank, world_size=2) for rank in (0, 1)]
    outcomes, findings = judge(run(made))
    substantial = {kind.code for kind in all_checks() if kind.substantial}
    assert any(o.kind is OutcomeKind.RAN and o.code in substantial for o in outcomes) is sane
    assert [f.severity for f in findings if f.code == "LAU125"] == ([] if sane else [Severity.WARNING])
    if not sane:
        (kept,) = [f for f in findings if f.code == "LAU125"]
        assert "127 of 128" in kept.message and kept.notes == ("after_step: RuntimeError('x')",)
        assert "the probe failed at most steps" in {o.reason for o in outcomes if o.kind is OutcomeKind.INCONCLUSIVE}


def test_a_check_that_breaks_for_another_reason_has_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ClipWithoutUnscale, "end", broken)
    outcomes, findings = judge(run([recording([], rank=0, world_size=1)]))
    assert [o.code for o in outcomes if o.kind is OutcomeKind.CRASHED] == ["OPT110"] and "LAU125" not in {f.code for f in findings}
