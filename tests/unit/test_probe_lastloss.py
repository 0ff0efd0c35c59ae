"""The loss that a row has: that of the script, also where backward() was called on what a GradScaler made of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.probe import lastloss  # noqa: E402
from harness.probe.sensors import scales  # noqa: E402
from harness.probe.sensors.backward import _enter  # noqa: E402
from harness.probe.state import S  # noqa: E402

AT = ("train.py", 7, "main")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    recorder = SimpleNamespace(event=lambda *args, **fields: None, disabled=False, errors=0, role="main")
    for name, value in (("recorder", recorder), ("backwards", 300), ("steps", 300), ("light", True), ("loss", None), ("loss_scale", 1.0)):
        monkeypatch.setattr(S, name, value)
    monkeypatch.setattr(scales, "_scaled", {})
    yield


def told(backward_on: Any) -> float | None:
    _enter(backward_on, AT)
    return lastloss.value()


def scaled(loss: Any, scale: float, enabled: bool = True) -> Any:
    result = loss * scale if enabled else loss
    scales._after_scale(result, SimpleNamespace(get_scale=lambda: scale, is_enabled=lambda: enabled), loss)
    return result


def test_the_factor_of_the_scaler_is_taken_off() -> None:
    loss = torch.tensor(1.5, requires_grad=True) * 1
    assert told(loss) == 1.5
    assert told(scaled(loss, 1024.0)) == 1.5
    assert told(scaled(loss, 2.0)) == 1.5  # it is another one at each step
    assert told(scaled(loss, 65536.0, enabled=False)) == 1.5
    assert told(loss * 3) == 4.5  # a factor of the script's own belongs to its loss


def test_the_loss_itself_is_gone_and_one_of_two_is_scaled() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    assert told(scaled(weight * 2, 512.0)) == 4.0
    assert told(weight * 5) == 10.0


def test_several_numbers() -> None:
    losses = torch.tensor([1.0, 3.0], requires_grad=True) * 1
    _enter(scaled(losses, 8.0), AT)
    assert lastloss.value() == 2.0


def test_not_finite_stays_so() -> None:
    loss = torch.tensor(float("inf"), requires_grad=True) * 1
    assert told(scaled(loss, 1024.0)) == float("inf")
