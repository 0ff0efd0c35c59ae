"""SYN105 and SYN125 where ranks hold parameters that others do not, so that the same name stands at another place."""

from __future__ import annotations

import struct

import pytest
from builder import event, findings
from replica_runs import NAMES, by_rank, setup, two_ranks

from harness.checks.registry import all_checks
from harness.probe import protocol
from harness.record import Event, Run

SYN105, SYN125 = (next(c for c in all_checks() if c.code == code) for code in ("SYN105", "SYN125"))
WHOLE = 6  # step from which on every rank holds all four


def made_at_first_use(*, differ: bool, met: bool = True) -> Run:
    """Layer 0 was wrapped; 1.bias comes on rank 0 and 1.weight on rank 1, and from step 6 on, if they have `met`, both ranks hold both."""

    def told(rank: int) -> list[Event]:
        own, others = (NAMES[2 + rank], NAMES[3 - rank])
        params = {"opt": 0, "kind": "SGD", "line": 22, "owned": [True] * 4, "requires_grad": [True] * 4}
        events = [event("params", names=[*NAMES[:2], own], numels=[1] * 3, ddp=[0, 0, -1], **params)]
        events.append(event("wrap_changed", line=40 + rank, index=0, what="added", names=[own], s=1))
        if met:
            events.append(event("params", s=WHOLE, names=[*NAMES[:2], own, others], numels=[1] * 4, ddp=[0, 0, -1, -1], **params))
            events.append(event("wrap_changed", line=40 + rank, index=0, what="added", names=[others], s=WHOLE))
        return events

    made = two_ranks(each=by_rank(grad=(5, 55), param=(6, 66)), setup_of=lambda rank: [*setup(rank)[:3], *told(rank)])
    for rank, recording in enumerate(made.present):
        blob = b""
        for step in range(12):
            num = 4 if met and step >= WHOLE else 3
            values = [50, 51, *[60 + (rank * differ)] * (num - 2)]
            blob += protocol.DETAIL.pack(step, 0, num) + struct.pack(f"<{2 * num}I", *values, *values)
        recording.params = blob
    return made


@pytest.mark.parametrize(("differ", "met", "lines"), [
    (True, True, [40]),
    (False, True, []),  # averaged by hand
    (True, False, []),  # no layer is on both ranks
])  # fmt: skip
def test_layers_that_come_one_by_one(differ: bool, met: bool, lines: list[int]) -> None:
    found = findings(SYN105, made_at_first_use(differ=differ, met=met))
    assert [f.where and f.where.line for f in found] == lines
    assert not found or "2 parameters were added" in found[0].message


@pytest.mark.parametrize(("top", "fires"), [((7, 7), False), ((7, 8), True)])
def test_wrapped_parameters_behind_tables_of_each_ranks_own(top: tuple[int, int], fires: bool) -> None:
    def told(rank: int) -> list[Event]:
        tables = [f"table{i}" for i in range(3 - rank)]
        names = [*tables, "bottom", "top"]
        params = {"opt": 0, "kind": "SGD", "line": 22, "names": names, "numels": [1] * len(names), "owned": [True] * len(names)}
        events = [event("params", ddp=[*[-1] * len(tables), 0, 0], requires_grad=[True] * len(names), **params)]
        return [*events, event("initial", opt=0, each=[*(10 * rank + i for i in range(len(tables))), 5, top[rank]])]

    made = two_ranks(each=by_rank(grad=(5, 55), param=(6, 66)), setup_of=lambda rank: [*setup(rank)[:3], *told(rank)])
    assert [f.notes for f in findings(SYN125, made)] == ([("top",)] if fires else [])
