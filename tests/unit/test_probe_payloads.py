"""What a statement pickles is weighed call by call, and told at the 32nd, the 64th, ... call."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.probe.recorder import Recorder
from harness.probe.sensors import payloads
from harness.probe.state import S


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setattr(payloads, "_series", {})
    monkeypatch.setattr(payloads, "_pickled_bytes", [0])
    monkeypatch.setattr(S, "recorder", Recorder(str(tmp_path), "main"))
    yield S.recorder
    S.recorder.forget()


def _told(tmp_path: Path) -> list[list[list[float]]]:
    lines = [json.loads(line) for path in tmp_path.rglob("*.jsonl") for line in path.read_text().splitlines()]
    return [line["series"] for line in lines if line["k"] == "payloads"]


def test_a_series_stays_short_and_evenly_spaced(recorder: Any, tmp_path: Path) -> None:
    site = ("train.py", 3, "main")
    for call in range(128):
        payloads._pickled_bytes[0] = 100 * call + 1
        payloads.note("all_gather_object", site, 0.5)
        payloads.note("all_gather_object", site, 0.5)  # a rank that only receives
    first, second, third = _told(tmp_path)
    assert [s[:3] for s in first] == [[n, 100 * n + 1, 0.5 * (n + 1)] for n in range(32)]
    assert [s[0] for s in second] == list(range(0, 64, 2)) and [s[0] for s in third] == list(range(0, 128, 4))


def test_nothing_is_told_of_few_calls(recorder: Any, tmp_path: Path) -> None:
    for call in range(31):
        payloads._pickled_bytes[0] = call + 1
        payloads.note("gather_object", ("train.py", 4, "main"), 0.1)
    assert _told(tmp_path) == []


def test_a_history_holds_what_was_sent_before_and_a_curriculum_does_not() -> None:
    draws, history, longer = random.Random(3), payloads.Series(), payloads.Series()
    kept: list[float] = []
    for call in range(40):
        fresh = [draws.random() for _ in range(10)]
        kept += fresh
        for series, sent in ((history, {"call": call, "all": kept}), (longer, {"call": call, "all": [draws.random() for _ in kept]})):
            content = torch.frombuffer(bytearray(pickle.dumps(sent)), dtype=torch.uint8)
            series.add(content.numel(), 0.1, content)
    assert history.held[0] > 30 and history.held[1] == 39 and longer.held == [0, 39]


def test_equal_bytes_tell_nothing() -> None:
    series = payloads.Series()
    for size in (400, 500, 600):
        series.add(size, 0.1, torch.zeros(size, dtype=torch.uint8))
    assert series.held == [0, 0]
