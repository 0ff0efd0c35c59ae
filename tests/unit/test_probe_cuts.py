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
        "kept, padding = torch.split(rows, [n, len(rows) - n])",
        "kept = np.split(rows, [n])[0]",
        "right = [a == b for a, b in zip(predicted, data.labels)]",
    ],
)
def test_what_may_cut(source: str) -> None:
    assert any(cuts._cuts(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "p = all[rank::world]", "b = x[i:i + n]", "t = x[:10]", "t = x[:-1]", "out['loss'] = 1", "y = x[order]", "yy, xx = np.mgrid[:size, :size]",
        "t = x[:, :3]", "t = score[label == c]", "t = x[p > 0.5]",
        "t = zip(model.parameters(), ema)", "t = x.split(8)", "t = text.split()", "train, test = torch.split(x, [80, 20])",
    ],
)  # fmt: skip
def test_what_does_not(source: str) -> None:
    assert not any(cuts._cuts(node) for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize(("source", "cuts_some"), [("real = ids < size\np = rows[real]", True), ("real = ids < size\np = rows[order]", False)])
def test_a_mask_with_a_name(source: str, cuts_some: bool) -> None:
    assert cuts._any_in(list(ast.walk(ast.parse(source)))) == cuts_some


FORWARD = "class Net(nn.Module):\n    def forward(self, x):\n        return x + self.pos[:, : x.size(1)]\n"
GATHERING = FORWARD + "        dist.all_gather(parts, x)\n"
NO_MODEL = "def forward(x):\n    return x[:n]"


@pytest.mark.parametrize(("source", "cuts_some"), [(FORWARD, False), (GATHERING, True), (FORWARD + "p = all[:n]", True), (NO_MODEL, True)])
def test_a_models_forward_cuts_nothing_that_is_gathered(source: str, cuts_some: bool) -> None:
    assert cuts._any_in(cuts._outside_models(ast.parse(source))) == cuts_some
