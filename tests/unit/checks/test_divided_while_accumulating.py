"""OPT143: the sum of gradients so far is divided, more than once a step."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings
from replica_runs import two_ranks

from harness.checks.registry import all_checks

OPT143 = next(c for c in all_checks() if c.code == "OPT143")


@pytest.mark.parametrize(("factors", "last", "fires"), [
    ([0.25, 0.25, 0.25], 0.25, True),
    ([1.0, 0.25, 1.0, 0.25, 1.0], None, True),  # after every second one; averaged by hand before the step
    ([0.5], 0.5, True),
    ([0.5], 1.0, False),  # the weight of one task
    ([0.5], None, False),
    ([0.5, 0.3], 1.0, False),  # each clipped to a norm
    ([0.5, None, 0.5], 0.5, False),  # reduced in between
    ([1.0, 1.0], 0.25, False),  # once, before the step
])  # fmt: skip
def test_factors_between_the_backwards_of_a_step(factors: list[Any], last: float | None, fires: bool) -> None:
    def told(rank: int) -> list[Any]:
        return [event("rescaled", line=40, s=s, opt=0, factors=factors, last=last) for s in range(2)]

    made = two_ranks(extra=told, each=lambda rank, step: {"num_backward": len(factors) + 1})
    found = findings(OPT143, made)
    assert [f.where and f.where.line for f in found] == ([40] if fires else [])


def test_one_step_alone_may_be_chance() -> None:
    once = event("rescaled", line=40, s=0, opt=0, factors=[0.5, 0.5], last=1.0)
    assert findings(OPT143, two_ranks(extra=lambda rank: [once], each=lambda rank, step: {"num_backward": 3})) == []
