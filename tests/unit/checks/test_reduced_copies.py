"""Copies of gradients that are reduced and dropped: told by their size, at the statement that reduces the others."""

from __future__ import annotations

from typing import Any

from builder import event, recording, row, run

from harness.checks.syn import reduced_copies
from harness.record import Run


def reduced(*told: tuple[int, bool], **fields: Any) -> Run:
    params = event("params", opt=0, names=["conv.weight", "fc.weight"], numels=[432, 72])
    calls = [event("coll", s=1, line=41, op="all_reduce", numel=n, grad=grad, **fields) for n, grad in told]
    return run([recording([params, *calls], [row(0), row(1)], rank=r) for r in (0, 1)])


def dropped(of: Run) -> bool:
    return reduced_copies.dropped(of, of.present[0].of("coll")[0].where, ["conv.weight"])


def test_a_copy_is_reduced() -> None:
    assert dropped(reduced((432, False), (72, True)))


def test_what_is_left_out_or_something_else() -> None:
    assert not dropped(reduced((72, True)))
    assert not dropped(reduced((1, False), (72, True)))  # a count
    assert not dropped(reduced((432, False)))  # no gradient is reduced here
    assert not dropped(reduced((432, False), (72, True), inside=True))  # an activation's, in the backward
