"""Whether a script may cut what it gathers, read from its source."""

from __future__ import annotations

import ast

import pytest

from harness.probe import cuts


@pytest.mark.parametrize(
    "source",
    [
        "p = all[:len(data)]",
        "p = all[0:n]",
        "u = np.unique(ids)",
        "d = {i: p for i, p in rows}",
        "out[index] = score",
        "s = set(ids)",
        "narrow(p, 0, 0, n)",
    ],
)
def test_what_may_cut(source: str) -> None:
    assert any(cuts._cuts(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize(
    "source", ["p = all[rank::world]", "b = x[i:i + n]", "t = x[:10]", "t = x[:-1]", "out['loss'] = 1", "y = x[order]"]
)
def test_what_does_not(source: str) -> None:
    assert not any(cuts._cuts(node) for node in ast.walk(ast.parse(source)))
