"""DEV111: memory of to_empty() that was never written, and what was."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.dev.never_filled import NeverFilled
from harness.model import Severity
from harness.record import Event, Run
from tests.unit.checks.builder import event, findings, recording, row, run, site

FREQUENCIES = ["blocks.0.rotary.inv_freq", True, False, False]
ZEROS = ["blocks.0.mask", True, False, True]
WEIGHT = ["head.weight", False, True, False]


def two(*ranks: list[list[Any]], data_writes: bool = False) -> Run:
    def told(names: list[list[Any]]) -> list[Event]:
        fields = {"names": names, "num": len(names), "read": site(22, "angle = t * self.inv_freq"), "data_writes": data_writes}
        return [event("never_filled", line=93, **fields)] if names else []

    return run([recording(told(names), [row(s) for s in range(4)], rank=r) for r, names in enumerate(ranks)])


def test_a_buffer_that_no_checkpoint_brings() -> None:
    (found,) = findings(NeverFilled, two([FREQUENCIES], [FREQUENCIES]))
    assert (found.severity, found.where and found.where.line, found.ranks) == (Severity.ERROR, 93, (0, 1))
    assert "the buffer `blocks.0.rotary.inv_freq` was never written" in found.message and "persistent=False" in found.notes[1]
    (found,) = findings(NeverFilled, two([WEIGHT], []))
    assert "parameter `head.weight`" in found.message and found.ranks == (0,) and "strict=False" in found.help


@pytest.mark.parametrize(("ranks", "data_writes", "fires"), [
    (([ZEROS], [ZEROS]), False, True),
    (([ZEROS], []), False, False),  # the other rank has values, and may have sent them
    (([ZEROS], [ZEROS]), True, False),  # mask.data.zero_() leaves no trace
    (([], []), False, False),
])  # fmt: skip
def test_zeros_may_have_been_written(ranks: tuple[list[list[Any]], ...], data_writes: bool, fires: bool) -> None:
    assert bool(findings(NeverFilled, two(*ranks, data_writes=data_writes))) is fires
