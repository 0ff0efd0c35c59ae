"""SYN116 where the script makes the buffers equal itself: whose buffers it sends, and how they are known."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from builder import event, findings
from replica_runs import NAMES, two_ranks, wrap_event

from harness.checks.syn.buffers import BufferNotReduced
from harness.model import Severity
from harness.probe import replicated
from harness.probe.state import S
from harness.record import Event, Run


def observed(*sent: Event, live: bool = False, extra: tuple[Event, ...] = ()) -> Run:
    """A model with two observers that follow each rank's own batches."""

    def started(r: int) -> list[Event]:
        return [
            event("pg", done=True, rank=r, world_size=2), event("wrapping", line=20, names=NAMES),
            wrap_event(buffers=["q.lo", "q.hi"], own_buffers=["q.lo", "q.hi"], own_buffer_site=None),
            event("params", line=22, opt=0, names=NAMES, numels=[4] * 4, ddp=[0] * 4, owned=[True] * 4, requires_grad=[True] * 4),
        ]  # fmt: skip

    return two_ranks(setup_of=started, each=lambda r, s: {"buffer": 90 + s + 50 * r, "num_forward": 1}, extra=lambda r: [*sent, *extra], live=live)


@pytest.mark.parametrize(("until", "fires"), [(8, False), (20, True), (36, True)])
def test_memory_that_differs_until_it_is_filled(until: int, fires: bool) -> None:
    """Of 40 steps: from then on the buffers are equal."""
    bank = two_ranks(
        steps=40, extra=lambda r: [wrap_event(buffers=["bank"], own_buffers=["bank"], own_buffer_site=None)],
        each=lambda r, s: {"buffer": 90 + s + 50 * r * (s < until), "num_forward": 1},
    )  # fmt: skip
    assert bool(findings(BufferNotReduced, bank)) == fires


def sends(name: str, *, s: int = 6, op: str = "broadcast") -> Event:
    return event("coll", line=70, s=s, op=op, numel=1, buffer=name)


def test_buffers_that_nobody_sends() -> None:
    for kind in ((), (sends("q.lo"),), (sends("q.lo", s=0), sends("q.hi", s=0)), (sends("q.lo", s=3), sends("q.hi", s=3))):  # none, some, at the start only
        (found,) = findings(BufferNotReduced, observed(*kind))
        assert found.severity is Severity.WARNING and len(found.notes) == 1


@pytest.mark.parametrize("op", ["broadcast", "all_reduce"])
def test_buffers_that_the_script_makes_equal_itself(op: str) -> None:
    (found,) = findings(BufferNotReduced, observed(sends("q.lo", op=op), sends("q.hi", op=op)))
    assert found.severity is Severity.ADVICE and f"{op} at" in found.notes[1]


def test_buffers_that_are_sent_again_and_again() -> None:
    (found,) = findings(BufferNotReduced, observed(*(sends(n, s=s) for n in ("q.lo", "q.hi") for s in (2, 4))))
    assert found.severity is Severity.ADVICE


def test_before_the_first_evaluation_of_a_live_run_nothing_is_said() -> None:
    assert findings(BufferNotReduced, observed(live=True)) == []
    for told in ((event("evaluated", s=6),), (event("pass", s=3), event("pass", s=6))):
        (found,) = findings(BufferNotReduced, observed(live=True, extra=told))
        assert found.severity is Severity.WARNING


@pytest.fixture
def observer() -> Iterator[torch.nn.Module]:
    net = torch.nn.Linear(2, 2)
    net.register_buffer("lo", torch.zeros(3))
    wrapper = torch.nn.Module()
    wrapper.module = net
    S.ddps.append(SimpleNamespace(refs={}, names={}, ignored=set(), own_buffers=["lo"], ref=lambda: wrapper))
    replicated._read_at[0] = (-1, -1)
    yield net
    S.ddps.pop()
    replicated._read_at[0] = (-1, -1)


def test_a_buffer_is_known_by_its_memory(observer: torch.nn.Module) -> None:
    lo = observer.get_buffer("lo")
    assert replicated.buffer(lo) == replicated.buffer(lo.detach()) == replicated.buffer(observer.state_dict()["lo"]) == "lo"
    assert replicated.buffer(lo[:2]) == replicated.buffer(torch.zeros(3)) == replicated.buffer(None) == ""
    assert replicated.digest(lo) == 0
