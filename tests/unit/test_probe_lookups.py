"""Numbers of names that stay with the script, and those that may reach a model, as the source shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import lookups

BUILT = """
class Data:
    def __init__(self, words):
        self.number = {}
        for w in words:
            if w not in self.number:
                self.number[w] = len(self.number)
            self.number.setdefault(w, 0)

    def __getitem__(self, i):
        w = self.rows[i]
"""


def of(tmp_path: Path, statement: str) -> tuple[bool, set[str]]:
    path = tmp_path / "data.py"
    path.write_text(BUILT + "".join(f"        {line}\n" for line in statement.splitlines()))
    return lookups.stay_inside("number", [str(path)])


@pytest.mark.parametrize(
    "statement",
    [
        "return self.x[i], 0.2 if self.number[w] < 5 else 1.0",
        "rank = self.number[w]\nif rank + 1 > 5 and rank != 7:\n    return self.x[i]\nreturn self.y[i]",
        "return sorted(self.words[i], key=self.number.get)",
        "return sorted(self.words[i], key=lambda v: self.number[v])",
        "return self.x[i], 1 / (1 + self.number[w]), math.log(self.number[w])",
        "print(f'word {self.number[w]}')",
    ],
)
def test_numbers_that_stay(tmp_path: Path, statement: str) -> None:
    assert of(tmp_path, statement) == (True, set())


@pytest.mark.parametrize("statement", ["return self.cache[self.number[w]]", "at = self.number[w]\nreturn self.cache[at].float()"])
def test_places_in_a_table(tmp_path: Path, statement: str) -> None:
    assert of(tmp_path, statement) == (True, {"cache"})


@pytest.mark.parametrize(
    "statement",
    [
        "return self.x[i], self.number[w]",
        "return torch.tensor([self.number[v] for v in w])",
        "return torch.tensor([self.number.get(v, 29) for v in w])",
        "id = self.number[w]\nif id > 3:\n    return id",
        "table = self.number\nreturn table[w]",
        "return torch.eye(9)[self.number[w]]",
        "return list(map(self.number.get, w))",
        "return self.encode(self.number, w)",
        "return [n for v, n in self.number.items() if v in w]",
        "return one_hot(torch.tensor(self.number[w]), 9)",
    ],
)
def test_numbers_that_may_be_fed(tmp_path: Path, statement: str) -> None:
    assert of(tmp_path, statement) == (False, set())


def test_without_source_or_use(tmp_path: Path) -> None:
    assert lookups.stay_inside("number", ["/none.py"]) == (False, set())
    path = tmp_path / "other.py"
    path.write_text("x = 1\n")
    assert lookups.stay_inside("number", [str(path)]) == (False, set())
