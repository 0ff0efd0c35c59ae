"""Gradient clipping, GradScaler, learning-rate schedulers.

Event "clip" (first 200): site, norm, scaled (gradients were still multiplied by a scaler's factor), max_norm.
Event "scaler" (first 64 steps): scale, site. Event "scaler_made": scale, enabled,
site. Event "scheduler" (first 400 steps of it): site, kind, last_epoch, lr, interval.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from .. import sites
from ..patching import after, before
from ..state import S
from . import backward

_unscaled: set[int] = set()


def _after_clip(result: Any, *args: Any, **kwargs: Any) -> None:
    try:
        norm = float(result) if getattr(getattr(result, "device", None), "type", "cpu") == "cpu" else math.nan
    except (TypeError, ValueError, RuntimeError):
        norm = math.nan
    S.since.grad_norm = norm
    limit = args[1] if len(args) > 1 else kwargs.get("max_norm", kwargs.get("clip_value"))
    S.recorder.event(
        "clip", sites.here(4), norm=norm, scaled=S.since.scale not in (0.0, 1.0) and not _unscaled, scale=S.since.scale,
        max_norm=float(limit) if isinstance(limit, (int, float)) else None, reduced=S.since.num_reduce, collectives=S.since.num_coll,
    )  # fmt: skip


def _after_scaler(result: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
    S.recorder.event("scaler_made", sites.here(4), scale=float(scaler.get_scale()), enabled=bool(scaler.is_enabled()))


def _before_unscale(scaler: Any, optimizer: Any) -> None:
    _unscaled.add(id(optimizer))


def _after_update(result: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
    _unscaled.clear()
    if S.steps < 64:
        S.recorder.event("scaler", sites.here(4), scale=float(scaler.get_scale()), enabled=bool(scaler.is_enabled()))


def _after_scheduler(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if not sites.is_user_code(sys._getframe(3).f_code):
        return  # a scheduler that steps others inside, or its own first step in the constructor
    S.sched_steps += 1
    optimizer = getattr(scheduler, "optimizer", None)
    group = optimizer.param_groups[0] if optimizer is not None and optimizer.param_groups else {}
    lr = group.get("lr")
    S.recorder.event(
        "scheduler", sites.here(4), kind=type(scheduler).__name__, last_epoch=getattr(scheduler, "last_epoch", None), id=id(scheduler) % 1_000_003,
        lr=float(lr) if isinstance(lr, (int, float)) else None, metrics=isinstance(args[0], float) if args else False,
    )  # fmt: skip


def arm() -> None:
    import torch

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        before(torch.nn.utils.clip_grad, name, lambda *a, **k: backward.note_unclipped())
        if after(torch.nn.utils.clip_grad, name, _after_clip):
            setattr(torch.nn.utils, name, getattr(torch.nn.utils.clip_grad, name))
    after(torch.amp.GradScaler, "__init__", _after_scaler)
    before(torch.amp.GradScaler, "unscale_", _before_unscale)
    after(torch.amp.GradScaler, "update", _after_update)
    scheduler = torch.optim.lr_scheduler
    for kind in list(vars(scheduler).values()):
        if isinstance(kind, type) and issubclass(kind, scheduler.LRScheduler) and "step" in vars(kind):
            after(kind, "step", _after_scheduler)
