"""A collective is seen under each name that torch has for it, unless torch's own sharding makes the call."""

from __future__ import annotations

import json
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

from harness.probe import protocol
from harness.probe.recorder import Recorder
from harness.probe.sensors import collectives
from harness.probe.state import S

NAMES = (*protocol.GATHER_INTO, *protocol.REDUCE_SCATTER_INTO)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(S, "recorder", Recorder(str(tmp_path), "main"))
    yield S.recorder
    S.recorder.forget()


def _ops(tmp_path: Path) -> list[str]:
    lines = [json.loads(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line["op"] for line in lines if line["k"] == "coll"]


def _call(collective: Any) -> None:
    collective(torch.zeros(4), torch.zeros(2))


@pytest.mark.parametrize("op", NAMES)
def test_what_a_script_calls_is_told_under_the_name_it_used(op: str, recorder: Any, tmp_path: Path) -> None:
    _call(collectives._make(op)(lambda *args, **kwargs: None))
    assert _ops(tmp_path) == [op]


@pytest.mark.parametrize("op", NAMES)
def test_what_sharding_calls_is_told_by_nobody(op: str, recorder: Any, tmp_path: Path) -> None:
    sharding = FunctionType(_call.__code__, {"__name__": "torch.distributed.fsdp", "torch": torch})
    sharding(collectives._make(op)(lambda *args, **kwargs: None))
    assert _ops(tmp_path) == []


def test_the_status_page_holds_the_longest_name(recorder: Any, tmp_path: Path) -> None:
    longest = max(collectives.OPS, key=len)
    recorder.enter(longest, ("train.py", 3, "main"))
    page = next(tmp_path.rglob("*.status")).read_bytes()
    status = protocol.parse_status(page)
    assert status is not None and status.op == longest


@pytest.mark.parametrize(("values", "backwards", "wanted"), [
    ([1.0, 2.0], 1, (True, None)), ([1.0, 2.0], 0, (False, None)), ([0.0, -0.0], 1, (False, True)), ([], 1, (False, None)),
])  # fmt: skip
def test_what_a_rank_puts_into_a_reduction_is_told_behind_a_backward(values: list[float], backwards: int, wanted: tuple[bool, Any]) -> None:
    told = collectives._content(torch.tensor(values), backwards)
    assert ("sent" in told, told.get("zero")) == wanted


def test_equal_contents_have_equal_digests() -> None:
    one, same, other = (collectives._content(torch.tensor([1.0, x]), 1)["sent"] for x in (2.0, 2.0, 3.0))
    assert one == same != other
