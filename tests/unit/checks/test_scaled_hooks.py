"""OPT110 on hooks of parameters that cut gradients which still bear a GradScaler's factor."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run

from harness.checks.opt.clip_scaled import ClipWithoutUnscale
from harness.record import Run

WANTED = [("OPT110", 50)]


def told(after: Any, *, bound: Any = lambda s: 0.05, kind: str = "leaf_hook", **values: Any) -> Run:
    """`after`: of a step's norm, what the hook leaves."""
    norms = [8.0 + s for s in range(8)]
    fields: dict[str, Any] = {"key": 0, "along": False, "scale": 128.0, "known": False} | values
    hooks = [
        event(kind, line=50, s=s, before=n, after=after(n), bound=bound(s), **{k: v(s) if callable(v) else v for k, v in fields.items()})
        for s, n in enumerate(norms)
    ]
    return run([recording([event("params", opt=0, devices=["cpu"]), *hooks], [row(s) for s in range(8)])])


def codes(made: Run) -> list[tuple[str, int | None]]:
    return [(f.code, f.where and f.where.line) for f in findings(ClipWithoutUnscale, made)]


@pytest.mark.parametrize("kind", ["leaf_hook", "accumulated_hook"])
def test_entries_are_cut_while_they_are_scaled(kind: str) -> None:
    (found,) = findings(ClipWithoutUnscale, told(lambda n: 0.3 * n, kind=kind))
    assert "scaler's 128" in found.message and "0.000391" in found.message and "8 of 8 steps" in found.notes[0]
    assert codes(told(lambda n: 0.3 * n, kind=kind)) == WANTED


def test_norms_are_brought_to_a_limit() -> None:
    assert codes(told(lambda n: 1.0, bound=lambda s: 0.0, along=True)) == WANTED
    assert codes(told(lambda n: 0.1 * n, bound=lambda s: 0.0, along=True)) == []  # another learning rate
    assert codes(told(lambda n: n, bound=lambda s: 0.0, along=True)) == []


def test_a_limit_that_may_bear_the_factor() -> None:
    assert codes(told(lambda n: 0.3 * n, known=True)) == []
    assert codes(told(lambda n: 0.3 * n, known=True, scale=lambda s: 128.0 * 2**s)) == WANTED  # the factor moves and the limit stays
    assert codes(told(lambda n: 0.3 * n, bound=lambda s: 0.05 * 2**s, scale=lambda s: 128.0 * 2**s)) == []


def test_healthy_neighbours() -> None:
    assert codes(told(lambda n: 0.3 * n, scale=0.0)) == []  # no scaler, or a disabled one
    assert codes(told(lambda n: 0.3 * n, scale=1.0)) == []
    assert codes(told(lambda n: 0.9 * n)) == []  # against spikes: most is left
    assert codes(told(lambda n: 0.3 * n, bound=lambda s: 0.0)) == []  # a mask
