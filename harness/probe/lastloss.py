"""The number that the last backward began from, without the factor that a GradScaler put on it."""

from __future__ import annotations

from typing import Any

from .state import S


def value() -> float | None:
    """The loss of the last backward. On a device this would wait for the GPU at every step: it is read when the copy has arrived."""
    loss = S.loss
    if loss is None:
        return None
    try:
        if isinstance(loss, float):
            return loss / S.loss_scale
        if loss.is_cpu:
            return (float(loss.item()) if loss.numel() == 1 else float(loss.detach().float().mean())) / S.loss_scale
        return _device_loss(loss)
    except (RuntimeError, TypeError):
        return None


_in_flight: list[tuple[Any, Any, float]] = []  # the copy, what tells that it has arrived, the factor that is on it


def _device_loss(loss: Any) -> float | None:
    """The newest device loss whose copy has arrived: a few steps old, without a wait."""
    import torch as untyped

    torch: Any = untyped
    host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)  # whatever the script's default device is
    host.copy_(loss.detach().float().mean(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    _in_flight.append((host, event, S.loss_scale))
    newest: float | None = None
    while _in_flight and _in_flight[0][1].query():
        arrived, _, scale = _in_flight.pop(0)
        newest = float(arrived) / scale
    return newest
