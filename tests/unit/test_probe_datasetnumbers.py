"""A data set that lies where another one lay is another one."""

from __future__ import annotations

import pytest

from harness.probe import datasets


class Data:
    def __len__(self) -> int:
        return 7


@pytest.fixture(autouse=True)
def blank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_bases", {})
    monkeypatch.setattr(datasets, "_num_bases", [0])


def test_numbers_are_given_once_and_in_order() -> None:
    first, second, plain = Data(), Data(), [1, 2]
    assert [datasets.number_of(d) for d in (first, second, plain, first, plain)] == [0, 1, 2, 0, 2]


def test_a_place_that_is_used_again_is_no_data_set_that_is_seen_again() -> None:
    places, numbers = set(), []
    for _ in range(50):
        one = Data()
        places.add(id(one))
        numbers.append(datasets.number_of(one))
        del one
    assert numbers == list(range(50)) and len(places) < 50
