"""An optimizer without DTensors is asked once, and nothing is told of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe.sensors import shardcopies


class DTensor:
    """Named as torch's is."""


def test_what_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(shardcopies, "_tell", lambda witness, params: told.append(shardcopies._steps[witness.opt]))
    monkeypatch.setattr(shardcopies, "_steps", {})
    plain: Any = SimpleNamespace(data=0)
    for _ in range(12):
        shardcopies._at_step(None, SimpleNamespace(opt=0), [plain])
        shardcopies._at_step(None, SimpleNamespace(opt=1), [plain, DTensor()])
    assert told == [1, 9] and shardcopies._steps == {0: -1, 1: 12}
