"""What the condition around a save compares, read from source and frames."""

from __future__ import annotations

import ast
import sys
import weakref
from pathlib import Path

import pytest

from harness.probe.sensors import decided

SOURCE = """
def fit(rank, loss, best, epoch, self):
    improved = loss < best
    if improved and rank == 0:
        save()
    if rank == 0:
        if epoch % 2 == 0:
            save()
    if rank == 0 and self.loss <= self.best:
        save()
    else:
        save()
"""


@pytest.mark.parametrize(
    ("line", "at", "sides"),
    [(5, 3, ["loss", "best"]), (8, 0, []), (10, 9, ["self.loss", "self.best"]), (12, 0, []), (3, 0, [])],
)
def test_comparisons_around_a_line(tmp_path: Path, line: int, at: int, sides: list[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(SOURCE)
    found = decided.comparisons(str(file), line)
    assert (found[0], [ast.unparse(side) for side in found[1]]) == (at, sides)


def test_values_are_read_without_calling_anything() -> None:
    class Owner:
        def __init__(self) -> None:
            self.best = 2

        @property
        def loss(self) -> float:
            raise AssertionError("a property of the script's")

    names = {"self": Owner(), "loss": 0.5, "flag": True}
    sides = [ast.parse(text, mode="eval").body for text in ("self.best", "self.loss", "loss", "flag", "gone", "gone.x")]
    assert [decided._value(side, names) for side in sides if isinstance(side, (ast.Name, ast.Attribute))] == [2.0, None, 0.5, None, None, None]


def test_reading_a_frame_keeps_nothing_alive() -> None:
    """Before Python 3.13 the dict that f_locals makes stays with the frame, and with it each tensor that was in a variable."""

    class Big:
        pass

    def fit(loss: float, best: float) -> bool:
        big = Big()
        ref = weakref.ref(big)
        if loss < best:
            found.append(decided._look(sys._getframe())[1])
        del big
        return ref() is None

    found: list[object] = []
    assert fit(1.0, 2.0) and found == [[["loss", 1.0], ["best", 2.0]]]
