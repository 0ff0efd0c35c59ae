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
    assert [(owner.__name__, name) for owner, name, _ in nameindexes._indexes([Data()])] == [("Vocabulary", "index")]


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


def test_index() -> None:
    assert nameindexes.is_index({"<pad>": 1, "a": 2, "b": 3, "c": 4})
