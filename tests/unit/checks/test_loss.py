"""Loss checks: finite, falling, equal to the reference; and indices out of range."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from harness.checks.engine import judge
from harness.checks.opt.index_out_of_range import IndexOutOfRange
from harness.checks.opt.loss_differs_from_reference import LossDiffersFromReference, tolerance
from harness.checks.opt.loss_does_not_fall import LossDoesNotFall
from harness.checks.opt.loss_not_finite import LossNotFinite
from harness.checks.opt.nondeterministic import Nondeterministic
from harness.model import Severity
from harness.probe import protocol
from harness.record import Run
from tests.unit.checks.builder import event, findings, recording, row, run

BAD = protocol.FLAG_LOSS_NOT_FINITE


def losses(*ranks: Sequence[float], **fields: int) -> Run:
    def flags(value: float) -> int:
        return 0 if math.isfinite(value) else BAD

    return run([
        recording([event("loss", line=9)], [row(s, loss=v, flags=flags(v), num_samples=8, **fields) for s, v in enumerate(values)], rank=r)
        for r, values in enumerate(ranks)
    ])  # fmt: skip


def test_a_step_with_a_loss_that_is_not_finite() -> None:
    (found,) = findings(LossNotFinite, losses([1.0] * 12, [1.0] * 10 + [math.nan] * 2))
    assert found.severity is Severity.ERROR and found.ranks == (1,) and found.where and found.where.line == 9
    assert found.message == "the loss is nan on rank 1, finite on rank 0, at step 10 and the step was taken"
    (both,) = findings(LossNotFinite, losses([1.0, math.nan], [1.0, math.nan]))
    assert both.message == "the loss is nan at step 1 and the step was taken"


def test_a_loss_that_recovers_is_a_warning() -> None:
    assert [f.severity for f in findings(LossNotFinite, losses([1.0, math.inf, 1.0, 1.0]))] == [Severity.WARNING]


def test_a_step_that_the_scaler_skipped_is_healthy() -> None:
    of = run([recording([], [row(0), row(1, loss=math.inf, flags=BAD | protocol.FLAG_SKIPPED), row(2)])])
    assert findings(LossNotFinite, of) == []


def test_a_finite_loss_is_healthy() -> None:
    assert findings(LossNotFinite, losses([2.0, 1.0], [2.1, 1.1])) == []


def noisy(start: float, end: float, noise: float, steps: int = 60) -> list[float]:
    random.seed(4)
    return [start + (end - start) * s / steps + random.gauss(0, noise) for s in range(steps)]


def test_a_flat_loss_is_advice_and_an_error_where_it_was_declared_to_fall() -> None:
    of = losses(noisy(2.3, 2.3, 0.001))
    assert [f.severity for f in findings(LossDoesNotFall, of)] == [Severity.ADVICE]
    of.expect = {"loss_falls": True}
    (found,) = findings(LossDoesNotFall, of)
    assert found.severity is Severity.ERROR and found.where and found.where.line == 9


@pytest.mark.parametrize("num_backward", [1, 4])
def test_the_last_of_several_backwards_counts(num_backward: int) -> None:
    assert findings(LossDoesNotFall, losses(noisy(2.3, 0.3, 0.01), num_backward=num_backward)) == []
    assert len(findings(LossDoesNotFall, losses(noisy(2.3, 2.3, 0.001), num_backward=num_backward))) == 1


def test_a_loss_of_exactly_zero_from_the_first_step_on() -> None:
    (found,) = findings(LossDoesNotFall, losses([0.0] * 30))
    assert found.severity is Severity.WARNING and found.where and found.where.line == 9
    assert findings(LossDoesNotFall, losses([*noisy(1.0, 0.1, 0.01), *[0.0] * 20])) == []  # it was learned


def test_a_rising_loss() -> None:
    assert len(findings(LossDoesNotFall, losses(noisy(1.0, 3.0, 0.1)))) == 1


def test_a_loss_that_began_next_to_nothing_is_no_base_for_a_percentage() -> None:
    (found,) = findings(LossDoesNotFall, losses([1e-9] * 20 + noisy(0.1, 0.2, 0.01, steps=40)))
    assert found.notes[0].startswith("change +0.1") and "%" not in found.notes[0]
    assert "%" in findings(LossDoesNotFall, losses(noisy(1.0, 3.0, 0.1)))[0].notes[0]


@pytest.mark.parametrize(
    "values", [noisy(2.3, 0.5, 0.1), noisy(2.3, 2.0, 0.05), noisy(2.3, 2.29, 0.5), noisy(2.3, 2.3, 0.001, steps=15), noisy(1.0, -1.0, 0.05)]
)
def test_falling_noisy_and_short_losses(values: list[float]) -> None:
    assert findings(LossDoesNotFall, losses(values)) == []


def test_losses_of_several_optimizers_need_not_fall() -> None:
    assert findings(LossDoesNotFall, run([recording([], [row(s, loss=1.0, opt=s % 2) for s in range(60)])])) == []


def compared(mine: Sequence[Sequence[float]], reference: Sequence[float]) -> Run:
    of = losses(*mine)
    of.reference = losses(reference)
    return of


CURVE = [2.3 * 0.98**s for s in range(60)]


def test_equal_to_rounding() -> None:
    up, down = [v * (1 + 1e-6) for v in CURVE], [v * (1 - 3e-6) for v in CURVE]
    assert findings(LossDiffersFromReference, compared([up, down], CURVE)) == []


def test_rounding_may_grow_with_the_steps() -> None:
    drift = [v * (1 + 1e-6 * (s + 1) ** 1.5) for s, v in enumerate(CURVE)]
    assert findings(LossDiffersFromReference, compared([drift, drift], CURVE)) == []


def test_a_wrong_scale_is_seen() -> None:
    wrong = [2.3 * 0.96**s for s in range(60)]
    (found,) = findings(LossDiffersFromReference, compared([wrong, wrong], CURVE))
    assert "at step 1:" in found.message and found.where and found.where.line == 9


def test_the_mean_over_ranks_is_weighted_by_samples() -> None:
    def rank(r: int, loss: float, samples: int) -> object:
        return recording([], [row(s, loss=loss, num_samples=samples) for s in range(10)], rank=r)

    of = run([rank(0, 1.0, 24), rank(1, 3.0, 8)])  # type: ignore[list-item]
    of.reference = losses([1.5] * 10)
    assert findings(LossDiffersFromReference, of) == []


def test_the_tolerance_grows_and_ends() -> None:
    assert tolerance(0) < tolerance(10) < tolerance(100) and tolerance(10**6) == 0.3


def twice(other: int) -> Run:
    of = run([recording([event("loss", line=9)], [row(s, param=s, indices=7) for s in range(10)], rank=r) for r in range(2)])
    of.reference = run([recording([], [row(s, param=s + other * (s > 4), indices=7) for s in range(10)], rank=r) for r in range(2)])
    return of


def test_two_runs_that_part() -> None:
    (found,) = findings(Nondeterministic, twice(1))
    assert found.message == "two runs with one seed part at step 5: other gradients or parameters"
    assert findings(Nondeterministic, twice(0)) == []


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("Target 10 is out of bounds.", "label 10 is out of range: there are 10 classes"),
        ("index 7 is out of bounds for dimension 1 with size 5", "index 7 is out of range for dimension 1 of size 5"),
        ("index out of range in self", "index 12 is out of range: cross_entropy has 10 rows"),
        ("Index 21 of input takes value 39 which is not in the valid range [0, 39)", "index 39 is out of range: there are 39 rows"),
    ],
)
def test_indices_out_of_range(message: str, says: str) -> None:
    offender = {"function": "cross_entropy", "smallest": 0, "largest": 12, "limit": 10}
    failure = event("failure", type="IndexError", message=message, line=30, offender=offender)
    (found,) = findings(IndexOutOfRange, run([recording([failure])], exits=(1,)))
    assert found.message == says and found.where and found.where.line == 30
    _, kept = judge(run([recording([failure])], exits=(1,)), select=("OPT118", "LAU"))
    assert [f.code for f in kept] == ["OPT118"] and kept[0].consequences == ("LAU101",)


def test_a_device_side_assert_over_classes() -> None:
    failure = event("failure", type="RuntimeError", message="CUDA error: device-side assert triggered", line=30)
    log = "Loss.cu:250: nll_loss: block [0,0,0], thread [4,0,0] Assertion `t >= 0 && t < n_classes` failed."
    assert "t < n_classes" in findings(IndexOutOfRange, run([recording([failure])], exits=(1,), logs={0: log}))[0].message


def test_other_index_errors_are_left_to_the_generic_finding() -> None:
    failure = event("failure", type="IndexError", message="list index out of range", line=30)
    assert findings(IndexOutOfRange, run([recording([failure])], exits=(1,))) == []


ALL = (IndexOutOfRange, LossDiffersFromReference, LossDoesNotFall, LossNotFinite, Nondeterministic)


@pytest.mark.parametrize("check", ALL)
def test_empty_and_torn_recordings_never_crash(check: type) -> None:
    torn = [event(k) for k in ("failure", "loss", "accumulation")] + [event("failure", message=None, offender="x")]
    of = run([recording(torn, [row(0)[:99]]), recording(torn, [row(s, loss=math.nan) for s in range(30)], rank=1)], exits=(1, 1))
    of.reference = run([])
    findings(check, of)
    of.reference = run([recording([], [row(0)]), recording([], [row(0)], rank=1)])
    findings(check, of)
    findings(check, run([]))


def test_a_generator_without_a_seed() -> None:
    def of(*seeded: str, moved: bool = True, deterministic: bool = True) -> Run:
        told = [event("seed", line=5, what=what, value=1) for what in seeded]
        return run([recording([*told, event("unseeded", line=23, moved=moved, deterministic=deterministic)])])

    (found,) = findings(Nondeterministic, of("torch", "numpy"))
    assert found.where is not None and found.where.line == 23 and found.severity is Severity.WARNING
    assert [f.severity for f in findings(Nondeterministic, of("torch", "numpy", deterministic=False))] == [Severity.ADVICE]
    assert findings(Nondeterministic, of("torch")) == []  # equal weights, no more
    assert findings(Nondeterministic, of("torch", "numpy", moved=False)) == []  # names, ports, delays


def test_a_stage_of_a_pipeline_has_no_loss() -> None:
    falling = [row(s, loss=2.0 - 0.03 * s) for s in range(60)]
    of = run([recording([event("loss", line=9)], [row(s, loss=math.nan) for s in range(60)]), recording([], falling, rank=1)])
    assert findings(LossDoesNotFall, of) == []
    rising = [row(s, loss=1.0 + 0.03 * s) for s in range(60)]
    of = run([recording([event("loss", line=9)], [row(s, loss=math.nan) for s in range(60)]), recording([], rising, rank=1)])
    assert [f.severity for f in findings(LossDoesNotFall, of)] == [Severity.ADVICE]
