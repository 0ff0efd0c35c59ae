"""SYN141: gradients that go round by messages and are averaged by nobody, and what else ranks send each other."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings
from replica_runs import by_rank, details, two_ranks

from harness.checks.syn.by_messages import MessagesAverageNothing
from harness.checks.syn.own_targets import TargetsWithoutOffset
from harness.probe import protocol
from harness.record import Event, Run

APART = by_rank(grad=(5, 55), param=(6, 66))
STEPS = 8


def message(s: int, numel: int, *, op: str = "recv", line: int = 51, **fields: Any) -> Event:
    return event("coll", line=line, s=s, op=op, numel=numel, dtype="float32", n=0, grad=False, world=True, names=[], **fields)


def ring(*, factor: float = 1 / 3, own: float = 0.0, written: tuple[int, ...] = (0, 1), sizes: tuple[int, ...] = (4, 16), graded: bool = True,
         start: tuple[int, int] = (1, 1), mixed: bool = False, reduced: int = 0, batch: bool = False) -> Run:  # fmt: skip
    """Two ranks whose gradients at the step are `factor` times their own, plus `own` times the rank; messages of these sizes before each step."""

    def extra(r: int) -> list[Event]:
        told: list[Event] = []
        for s in range(STEPS):
            fields = {"graded": True} if graded else {}
            if batch:
                told.append(message(s, -1, op="batch_isend_irecv", each=list(sizes), **fields))
            else:
                told += [message(s, n, op=op, line=line, **fields) for n in sizes for op, line in (("isend", 50), ("recv", 51))]
            told += [message(s, reduced, op="all_reduce", line=60)] if reduced else []
        for s in range(4):
            local = {"0": [1.0 + r, 2.0], "1": [3.0, 4.0 + r]}
            step = {k: [v * factor + own * (r + i) for i, v in enumerate(values, 1)] for k, values in local.items()} if r in written else local
            told.append(event("gradients", s=s, opt=0, local=local, at_step=step))
        for s in range(1, STEPS):
            after = [90 + s - 1 + i + 1000 * r for i in range(4)]
            told.append(event("before", s=s, opt=0, digest=protocol.digest_of([7, *after] if mixed else after)))
        return told

    run = two_ranks(steps=STEPS, ddp=False, each=APART, wrong={"grad": (0, 1, 2, 3), "param": (0, 1, 2, 3)}, extra=extra)
    for r, recording in enumerate(run.present):
        recording.params = details(STEPS, lambda s, i, r=r: 50 + s + i + 1000 * r, lambda s, i, r=r: 90 + s + i + 1000 * r)  # type: ignore[misc]
        initial = recording.of("initial")[0].data
        initial["each"] = [start[r]] * 4  # type: ignore[index]
    return run


@pytest.mark.parametrize(("told", "note"), [
    ({}, "nothing of what it received is in it"),
    ({"own": 0.3}, "on every rank to other values"),
    ({"sizes": (40,)}, "nothing of what it received"),  # all gradients in one message
    ({"batch": True}, "nothing of what it received"),
    ({"own": 0.3, "sizes": (20, 20)}, "on every rank to other values"),  # pieces of a flat gradient
    ({"own": 0.3, "written": (0,)}, "only rank 0 of 2"),
    ({"written": ()}, "as the backward left it"),  # of two ranks, each adds its own and divides by two
])  # fmt: skip
def test_messages_that_average_nothing_are_told(told: dict[str, Any], note: str) -> None:
    (found,) = findings(MessagesAverageNothing, ring(**told))
    assert note in found.notes[0]
    assert found.where is not None and found.where.line == 51


@pytest.mark.parametrize("told", [
    {"written": (), "sizes": (20, 20)},  # a pipeline: nobody writes gradients, and the sizes are not the parameters'
    {"sizes": (70,)},  # activations, and gradients that are scaled by hand
    {"graded": False},  # messages of the forward
    {"start": (1, 2)},  # stages that start apart
    {"mixed": True},  # gossip: parameters are written between the steps
    {"reduced": 40},  # a collective carries the gradients
])  # fmt: skip
def test_other_messages_are_not_judged(told: dict[str, Any]) -> None:
    assert findings(MessagesAverageNothing, ring(**told)) == []


def test_targets_that_lack_the_ranks_offset() -> None:
    def extra(rank: int) -> list[Event]:
        return [event("own_targets", line=57, op="NllLoss", rows=16, columns=32)] if rank else []

    (found,) = findings(TargetsWithoutOffset, two_ranks(extra=extra))
    assert found.where is not None and found.where.line == 57 and found.ranks == (1,)
    assert "takes 0 to 15 for its own, which lie at 16 to 31" in found.message
    assert findings(TargetsWithoutOffset, two_ranks()) == []
