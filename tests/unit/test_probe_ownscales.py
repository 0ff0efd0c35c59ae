"""What a model is fed, against the mean 0 and the deviation 1 that a share's own constants leave: told for those, and for nothing that comes near."""

from __future__ import annotations

import ast
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.probe.sensors import ownscales  # noqa: E402
from harness.probe.standardising import Scaling  # noqa: E402
from harness.probe.state import S  # noqa: E402

TREE = ast.parse("mean = 1\nstd = 2")
NAMES = [ast.Name("mean", ctx=ast.Load()), ast.Name("std", ctx=ast.Load())]


class Told:
    """Stands for the recorder."""

    errors = 0

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, site: Any, /, **fields: Any) -> None:
        self.events.append(fields)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    monkeypatch.setattr(S, "recorder", told)
    one = Scaling((__file__, 12, "fed"), (__file__, 11, "fed"), *NAMES, TREE)
    for name, start in (("_found", [one]), ("_scales", []), ("_rows", []), ("_sums", []), ("_over", [False])):
        monkeypatch.setattr(ownscales, name, start)
    return told


def rows(n: int = 100, columns: int = 3, seed: int = 0) -> Any:
    g = torch.Generator().manual_seed(seed)
    return 900 + 40 * torch.rand(n, columns, generator=g)


def scaled(x: Any, of: Any = None, dim: int = 0) -> Any:
    of = x if of is None else of
    return (x - of.mean(dim, keepdim=True)) / of.std(dim, keepdim=True)


def fed(x: Any, size: int = 16, passes: int = 2) -> list[dict[str, Any]]:
    for epoch in range(passes):
        g = torch.Generator().manual_seed(epoch)
        for batch in x[torch.randperm(len(x), generator=g)].split(size):
            ownscales.note([torch.zeros(4, dtype=torch.long), batch])
    ownscales._tell()
    return S.recorder.events  # type: ignore[attr-defined,no-any-return]


def test_a_share_by_its_own_constants() -> None:
    (told,) = fed(scaled(rows()))
    assert (told["after"], told["rows"], told["columns"], told["of"]) == ([7], 100, 3, 3)


def test_a_column_of_classes_beside_them() -> None:
    (told,) = fed(torch.cat([scaled(rows()), torch.arange(100)[:, None] % 2.0], 1))
    assert (told["columns"], told["of"]) == (3, 4)


def test_other_inputs() -> None:
    x = rows()
    silent = [
        scaled(x, of=torch.cat([x, rows(seed=1) + 30])),  # by the constants of all ranks
        scaled(x, of=torch.cat([x, rows(seed=1)])),  # the same of shares that are alike
        scaled(x, dim=1),  # each row by itself
        torch.randn(100, 3, generator=torch.Generator().manual_seed(3)),
        x,
    ]
    for one in silent:
        ownscales._over[0] = False
        ownscales._rows.clear()
        ownscales._sums.clear()
        assert fed(one) == []


def test_images_and_texts_are_left_alone() -> None:
    ownscales.note([torch.zeros(4, 3, 8, 8)])
    assert ownscales._over == [True]


def test_the_constants_are_read_and_let_go() -> None:
    mean, std = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    import sys

    frame = sys._getframe()
    one = Scaling((__file__, 1, frame.f_code.co_name), (__file__, 1, ""), *NAMES, TREE)
    assert ownscales._read(one, [(frame, {"mean": mean, "std": std})]) == [{"name": "mean", "mean": [1.0, 2.0], "std": [3.0, 4.0]}]
    assert ownscales._read(one, [(frame, {"mean": mean, "std": "none"})]) == []
