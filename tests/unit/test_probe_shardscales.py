"""The factor that became of a shard, and where the source reads one."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import factors
from harness.probe.sensors import shardscales

BEFORE = [1.0, -2.0, 0.0, 4.0]


@pytest.mark.parametrize(("after", "expected"), [
    ([0.5, -1.0, 0.0, 2.0], 0.5),
    (BEFORE, 1.0),
    ([0.5, -1.0, 0.1, 2.0], None),  # noise
    ([1.0, -1.0, 0.0, 1.0], None),  # clamped
    ([0.0] * 4, None),
    ([0.5, -1.0], None),
])  # fmt: skip
def test_one_factor_or_none(after: list[float], expected: float | None) -> None:
    found = factors.factor(BEFORE, after, shardscales.CLOSE)
    assert found == pytest.approx(expected) if expected is not None else found is None


def test_too_few_values_tell_nothing() -> None:
    assert factors.factor([1.0, 0.0, 0.0, 2.0], [0.5, 0.0, 0.0, 1.0], shardscales.CLOSE) is None


def test_where_a_shard_of_a_gradient_is_read(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def show(params):\n    return [p.to_local() for p in params]\n\n\n"
        "def clip(params):\n    grads = [p.grad for p in params]\n    return sum(g.to_local().square().sum() for g in grads)\n"
    )
    found = shardscales.reads_shard(str(script))
    assert found is not None and found[1:] == (7, "clip")
