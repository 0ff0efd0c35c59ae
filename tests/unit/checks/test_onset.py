"""How soon a mistake shows, by the recording as it stood after fewer steps."""

from __future__ import annotations

from typing import Any

import pytest
from replica_runs import two_ranks

from harness.onset import steps_until
from harness.probe.protocol import FLAG_CHANGED, FLAG_DDP, FLAG_ZEROED
from harness.record import Run

ZEROED = FLAG_DDP | FLAG_CHANGED | FLAG_ZEROED


def piling_up(first: int) -> Run:
    """12 steps; from `first` on the gradients are not zeroed before."""
    return two_ranks(each=lambda rank, step: {"flags": ZEROED if step < first else FLAG_DDP | FLAG_CHANGED})


def onset(code: str, of: Run) -> int | None:
    return steps_until(code, of.processes, of.plan, num_cores=2)


@pytest.mark.parametrize(("first", "steps"), [(0, 4), (1, 4), (2, 11)])
def test_the_step_from_which_on_it_is_told(first: int, steps: int) -> None:
    """Three dirty steps tell it, the first apart, if they are nine in ten."""
    assert onset("OPT102", piling_up(first)) == steps


@pytest.mark.parametrize(("code", "of"), [("OPT102", piling_up(99)), ("SYN101", piling_up(0))])
def test_what_is_not_found_or_only_by_the_end_has_no_step(code: str, of: Any) -> None:
    assert onset(code, of) is None
