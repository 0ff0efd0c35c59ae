"""SYN145 and its sensor: a handle of an asynchronous collective that nobody asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.checks.syn.never_waited import HandleNotWaited
from harness.model import Severity
from harness.probe import sites
from harness.probe.sensors import handles
from harness.probe.state import S
from tests.unit.checks.builder import event, findings, recording, run

SITE: sites.Site = ("/x/train.py", 12, "main")


def told(**fields: Any) -> Any:
    fields = {"op": "all_reduce", "way": "step", "grad": True, "numel": 80, "line": 12} | fields
    call = event("coll", op="all_reduce", numel=80, line=12)
    return run([recording([call, event("unwaited", **fields)]), recording([call], rank=1)])


def test_a_gradient_that_is_stepped_with_is_an_error_and_another_tensor_a_warning() -> None:
    (found,) = findings(HandleNotWaited, told())
    assert (found.severity, found.where.line if found.where else 0) == (Severity.ERROR, 12)
    (found,) = findings(HandleNotWaited, told(grad=False, way="dropped"))
    assert found.severity is Severity.WARNING


class Work:
    """What the sensor asks of a handle of torch's."""

    def wait(self) -> bool:
        return True


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bool]]]:
    found: list[tuple[str, bool]] = []

    class Recorder:
        disabled = False
        errors = 0

        def event(self, kind: str, site: sites.Site, /, **fields: Any) -> None:
            found.append((fields["way"], fields["grad"]))

    monkeypatch.setattr(S, "recorder", Recorder())
    monkeypatch.setattr(S, "group", object())
    monkeypatch.setattr(handles, "_told", set())
    monkeypatch.setattr(handles, "_open", {})
    monkeypatch.setattr(handles, "_dropped", [])
    monkeypatch.setattr(Work, "wait", handles._asking(Work.wait, "wait"))
    yield found


def started(tensor: torch.Tensor, *, grad: bool) -> Work:
    work = Work()
    handles.follow(work, handles.Handle("all_reduce", SITE, tensor, grad))
    return work


def test_a_step_with_a_gradient_that_is_still_reduced(said: list[tuple[str, bool]]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    kept = started(weight.grad, grad=True)
    handles._at_step(optimizer)
    assert said == [("step", True)]
    kept.wait()
    said.clear()
    handles._told.clear()
    handles._at_step(optimizer)
    assert said == []


def test_a_handle_that_is_thrown_away_counts_at_the_next_step(said: list[tuple[str, bool]]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    started(weight.grad, grad=True)
    started(torch.ones(4), grad=False)
    assert said == [("dropped", False)]
    handles._at_step(torch.optim.SGD([weight], lr=0.1))
    assert said == [("dropped", False), ("step", True)]


def test_what_was_waited_for_is_nobodys_business(said: list[tuple[str, bool]]) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    works = [started(weight.grad, grad=True), started(torch.ones(4), grad=False)]
    for work in works:
        work.wait()
    del work, works
    handles._at_step(torch.optim.SGD([weight], lr=0.1))
    assert said == []


@pytest.mark.parametrize(("args", "kwargs", "sends"), [((None, 0), {}, False), ((None, 1), {}, True), ((None,), {"dst": 1}, True), ((None,), {"group_dst": 1}, False)])
def test_who_only_sends_into_a_reduce_has_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch, args: Any, kwargs: Any, sends: bool) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert handles._sends_only(args, kwargs) is sends
