"""Repeated augmentation: the ranks draw equal indices on purpose, and what they make of a sample differs."""

from __future__ import annotations

from typing import Any

import pytest
from test_dat import NotSharded, SampleOrderDiffers, one_pass, said, share, silent, two

from harness.model import Severity
from harness.record import Run


def repeated(apart: bool, epochs: int = 2, again: bool = True, **told: Any) -> Run:
    """Equal indices on both ranks; where the samples are augmented, each look at one is another."""
    def own(rank: int) -> list[Any]:
        return [e for n in range(epochs) for e in one_pass(
            n, share(0), rows=[1000 + i + (5000 * rank + 20_000 * n * again) * apart for i in share(0)],
            **{"sampler": "Repeating", "distributed": None, "custom_sampler": True, "repeats": True, **told},
        )]  # fmt: skip

    return two(own(0), own(1))


def test_copies_that_look_different_are_meant() -> None:
    silent(NotSharded, repeated(apart=True))
    silent(SampleOrderDiffers, repeated(apart=True))
    silent(SampleOrderDiffers, repeated(apart=True, epochs=1))  # no sample is met twice


@pytest.mark.parametrize("told", [{"repeats": False}, {"repeats": None}])
def test_without_copies_it_is_the_fault(told: dict[str, Any]) -> None:
    found = said(NotSharded, repeated(apart=True, **told))
    assert found.severity is Severity.ERROR and "the script's own" in found.notes[0] and "no rank" not in found.notes[0]


def test_copies_that_look_alike_are_the_same_work_twice() -> None:
    found = said(NotSharded, repeated(apart=False))
    assert found.severity is Severity.WARNING and "alike on all" in found.notes[0]
