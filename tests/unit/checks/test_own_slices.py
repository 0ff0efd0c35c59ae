"""SYN133 where a gather's backward hands on the own part of one loss that every rank computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from builder import event, findings
from replica_runs import setup, two_ranks

from harness.checks.syn.gathered import GatheredWithoutGradient
from harness.model import Severity
from harness.record import Event, Run


def same(rank: int, step: int) -> Mapping[str, Any]:
    return {"loss": 3.0 - step / 10}


def handed_on(*more: Event, ddp: bool = True, kind: str = "SGD", each: Callable[[int, int], Mapping[str, Any]] = same, **fields: Any) -> Run:
    told = event("own_slice", line=25, **({"function": "Gather", "parts": 2, "numel": 64, "scaled": False} | fields))
    return two_ranks(ddp=ddp, each=each, setup_of=lambda r: setup(r, ddp=ddp, kind=kind), extra=lambda r: [told, *more])


@pytest.mark.parametrize(("told", "severities"), [
    (handed_on(), [Severity.WARNING]),
    (handed_on(kind="AdamW"), [Severity.ADVICE]),
    (handed_on(scaled=True), []),
    (handed_on(parts=4), []),  # of another group
    (handed_on(event("comm_hook", name="sum")), []),
    (handed_on(event("gradients", s=1, opt=0, local={"0": [1.0]}, at_step={"0": [2.0]})), []),  # made up for behind the backward
    (handed_on(each=lambda r, s: {"loss": 3.0 + r}), []),  # each rank's own rows
    (handed_on(ddp=False), []),  # reduced by hand: perhaps a sum
])  # fmt: skip
def test_the_own_part_of_one_loss(told: Run, severities: list[Severity]) -> None:
    found = findings(GatheredWithoutGradient, told)
    assert [f.severity for f in found] == severities
    assert all(f.where is not None and f.where.line == 25 and "1/2 of its gradient" in f.message for f in found)
