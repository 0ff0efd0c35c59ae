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
        "p = torch.stack(parts, 2).flatten(1)[:, :size]",
        "p = rows[ids < len(data)]",
        "index_select(rows, 0, order)",
    ],
)
def test_what_may_cut(source: str) -> None:
    assert any(cuts._cuts(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "p = all[rank::world]", "b = x[i:i + n]", "t = x[:10]", "t = x[:-1]", "out['loss'] = 1", "y = x[order]", "yy, xx = np.mgrid[:size, :size]",
        "t = x[:, :3]", "t = score[label == c]", "t = x[p > 0.5]",
    ],
)  # fmt: skip
def test_what_does_not(source: str) -> None:
    assert not any(cuts._cuts(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize(("source", "cuts_some"), [("real = ids < size\np = rows[real]", True), ("real = ids < size\np = rows[order]", False)])
def test_a_mask_with_a_name(source: str, cuts_some: bool) -> None:
    assert cuts._any_in(list(ast.walk(ast.parse(source)))) == cuts_some
