"""Whether an iterator has nothing left: told without drawing from it."""

from __future__ import annotations

from harness.probe.drained import nothing_in


def test_iterators_that_are_used_up() -> None:
    made = [(n for n in range(3)), filter(None, (n for n in range(3))), filter(None, [1, 2]), map(abs, filter(None, (n for n in range(3))))]
    for one in made:
        assert nothing_in(one) == ""
        list(one)
        assert nothing_in(one) == "used up"


def test_looking_draws_nothing() -> None:
    one = filter(None, (n for n in range(1, 4)))
    assert next(one) == 1 and nothing_in(one) == "" and list(one) == [2, 3]


def test_collections() -> None:
    assert [nothing_in(one) for one in ([], (), {}.values(), [1], {1: 2}.values(), 7, None)] == ["empty"] * 3 + [""] * 4
