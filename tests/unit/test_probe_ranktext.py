"""What is text for certain in a script: a launcher's variable that nobody converted."""

from __future__ import annotations

import ast

import pytest

from harness.probe.sensors.ranktext import comparisons


@pytest.mark.parametrize(
    "read", ['os.environ["RANK"]', 'os.environ.get("RANK", 0)', 'os.getenv("RANK")', 'environ["LOCAL_RANK"]', 'os.environ.get("RANK", "0")']
)
def test_a_variable_of_the_launcher_that_is_compared_with_a_number(read: str) -> None:
    found = comparisons(ast.parse(f"rank = {read}\ndef main():\n    return rank == 0\n"))
    assert [(line, name) for line, name, _ in found] == [(3, "rank")]
    assert comparisons(ast.parse(f"if {read} != 0:\n    pass\n"))[0][0] == 1


@pytest.mark.parametrize(
    "source",
    [
        'rank = int(os.environ["RANK"])\nprint(rank == 0)',
        'rank = os.environ["RANK"]\nrank = int(rank)\nprint(rank == 0)',
        'rank = os.environ["RANK"]\nprint(rank == "0")',
        'rank = os.environ["RANK"]\nprint(int(rank) == 0)',
        'rank = os.environ["RANK"]\ndef f(rank):\n    return rank == 0',
        'mode = os.environ["MODE"]\nprint(mode == 0)',
        'for rank in range(2):\n    print(rank == 0)\nrank = os.environ["RANK"]',
    ],
)
def test_what_is_converted_or_not_known_is_silent(source: str) -> None:
    assert comparisons(ast.parse(source)) == []
