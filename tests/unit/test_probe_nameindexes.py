"""What is an index of names, and what only looks like one."""

from __future__ import annotations

from typing import Any

import pytest

from harness.probe.sensors import nameindexes


class Vocabulary:
    def __init__(self) -> None:
        self.index = {"the": 0, "a": 1, "cat": 2, "dog": 3}
        self.counts = {"the": 7, "a": 7, "cat": 1, "dog": 1}

    def __call__(self, words: list[str]) -> list[int]:
        return [self.index[w] for w in words]


class Data:
    def __init__(self) -> None:
        self.rows = [(["the", "cat"], 1)] * 50
        self.vocabulary = Vocabulary()


def test_found_behind_the_data_set() -> None:
    assert [(type(owner).__name__, name) for owner, name, _ in nameindexes._indexes([Data()])] == [("Vocabulary", "index")]


@pytest.mark.parametrize(
    "value",
    [
        {"a": 0, "b": 1, "c": 2},  # too few
        {"a": 10, "b": 11, "c": 12, "d": 13},
        {"a": 0, "b": 0, "c": 1, "d": 2},
        {"a": 0, "b": 5, "c": 90, "d": 7},
        {0: 0, 1: 1, 2: 2, 3: 3},
        {"a": 0.0, "b": 1.0, "c": 2.0, "d": 3.0},
        {"a": False, "b": True, "c": 2, "d": 3},
        ["a", "b", "c", "d"],
    ],
)
def test_no_index(value: Any) -> None:
    assert not nameindexes.is_index(value)


def test_what_a_table_holds() -> None:
    torch = pytest.importorskip("torch")
    rows = torch.arange(12.0).view(4, 3)
    assert nameindexes._content(rows) == nameindexes._content(rows.clone()) != nameindexes._content(rows.flip(0))
    assert nameindexes._content(["a", "b"]) != nameindexes._content(["b", "a"])


def test_index() -> None:
    assert nameindexes.is_index({"<pad>": 1, "a": 2, "b": 3, "c": 4})


def test_rows_are_those_of_tables_and_of_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 64), torch.nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setattr(nameindexes.marks, "optimizers", lambda: [optimizer])
    monkeypatch.setattr(nameindexes.names, "root_modules", lambda: [model])
    assert nameindexes._rows() == {30, 5}  # 64 hidden units, and 64 files, are no pair


def test_rows_of_a_head_that_is_not_the_last_and_of_a_bag_of_words(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    heads, bag = [torch.nn.Linear(8, 16), torch.nn.Linear(16, 9), torch.nn.Linear(16, 2)], [torch.nn.Linear(40, 8), torch.nn.Linear(8, 40)]
    for layers, rows in ((heads, {9, 2}), (bag, {40})):
        model = torch.nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monkeypatch.setattr(nameindexes.marks, "optimizers", lambda optimizer=optimizer: [optimizer])
        monkeypatch.setattr(nameindexes.names, "root_modules", lambda model=model: [model])
        assert nameindexes._rows() == rows
