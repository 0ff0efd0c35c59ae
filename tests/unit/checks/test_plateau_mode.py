"""OPT135: a schedule in the wrong mode is named, and a schedule that waits for the other thing is not."""

from __future__ import annotations

from builder import event, findings, site
from replica_runs import two_ranks

from harness.checks.engine import judge
from harness.checks.opt.plateau_mode import PlateauMode
from harness.model import Finding, OutcomeKind, Severity

KIND = "ReduceLROnPlateau"
RISING = [0.52, 0.58, 0.63, 0.66, 0.65, 0.69]
FALLING = [1.4, 1.1, 0.9, 0.8, 0.82, 0.7]
CUT = [0.1, 0.1, 0.03, 0.03, 0.009, 0.009]


def said(values: list[float], mode: str, better: str, rates: list[float] = CUT, **fields: object) -> list[Finding]:
    told = [
        event("scheduler", line=70, **({"id": 7, "kind": KIND, "made": site(62), "lr": lr, "metric": v, "mode": mode, "better": better} | fields))
        for v, lr in zip(values, rates, strict=False)
    ]
    return findings(PlateauMode, two_ranks(extra=lambda rank: told))


def test_an_accuracy_that_rises_under_mode_min() -> None:
    (found,) = said(RISING, "min", "higher")
    assert found.severity is Severity.ERROR and found.where is not None and found.where.line == 62
    (soon,) = said(RISING, "min", "higher", [0.1] * 6)
    assert soon.severity is Severity.WARNING
    assert said([100 * v for v in RISING], "min", "higher")


def test_a_loss_that_falls_under_mode_max() -> None:
    (found,) = said(FALLING, "max", "lower")
    assert found.severity is Severity.ERROR and 'mode="min"' in (found.help or "")


def test_healthy_schedules() -> None:
    assert not said(RISING, "max", "higher")
    assert not said(FALLING, "min", "lower")
    assert not said(FALLING[::-1], "min", "lower")  # a validation loss that rises: overfitting, what the schedule is for
    assert not said(RISING, "min", "")  # a name that says nothing
    assert not said(RISING[:2], "min", "higher")
    assert not said([0.7, 0.5, 0.4, 0.3, 0.3, 0.3], "min", "higher")  # named so, and it falls as an error does
    assert not said([300.0, 410.0, 500.0, 600.0], "min", "higher")  # what accumulates
    assert not said([-v for v in RISING], "max", "lower")  # a loss that is turned round
    assert not said(RISING, "", "higher", metric=None)  # a schedule that follows nothing


def test_only_a_schedule_that_follows_a_known_metric_is_judged() -> None:
    def outcome_of(**fields: object) -> OutcomeKind:
        told = [event("scheduler", line=70, **({"id": 7, "kind": KIND, "lr": 0.1, "metric": 0.5, "mode": "min", "better": "lower"} | fields))]
        outcomes, _ = judge(two_ranks(extra=lambda rank: told), select=("OPT135",))
        return next(o.kind for o in outcomes if o.code == "OPT135")

    assert outcome_of() is OutcomeKind.RAN
    assert outcome_of(better="") is OutcomeKind.NOT_APPLICABLE
    assert outcome_of(mode="", metric=None) is OutcomeKind.NOT_APPLICABLE
