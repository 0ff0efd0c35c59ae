"""precision.py: a scaler that is given another scale than its own in the loop, by update() or with a state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.probe.sensors import precision
from harness.probe.state import S


class Scaler:
    def get_scale(self) -> float:
        return 8.0

    def is_enabled(self) -> bool:
        return True


@pytest.mark.parametrize(("loads_at", "update", "given"), [
    (None, (), [False, False]),
    (None, (4.0,), [True, True]),
    (0, (), [False, False]),  # a checkpoint
    (5, (), [True, False]),
])  # fmt: skip
def test_a_scale_that_the_script_gives(loads_at: int | None, update: tuple[float, ...], given: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(S, "recorder", SimpleNamespace(disabled=False, errors=0, event=lambda kind, site, **fields: told.append(fields["given"])))
    monkeypatch.setattr(S, "steps", loads_at or 0)
    if loads_at is not None:
        precision._after_loading(None, Scaler(), {})
    for _ in range(2):
        precision._after_update(None, Scaler(), *update)
    assert told == given
