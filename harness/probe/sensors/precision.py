"""Gradient clipping, GradScaler, learning-rate schedulers.

Event "clip" (first 200): site, norm, scaled (gradients were still multiplied by a scaler's factor), max_norm, accumulated
(backwards since the gradients were zero; 0: not known), no_sync (of the last backward), nothing ("used up": an iterator that had
been drawn to its end before; "empty": a collection without an element; "": it was given parameters, or that is not known), opt (the one optimizer
that steps the first of them that one does; -1: none has so far, or that is not known), stepped_inside (the step before came inside a backward).
Event "unscaled" (first 24 steps): site, collectives, reduced (calls and reducing backwards
since the last step: whether the gradients can have been averaged). Event "unscaled_grads" (first 8 steps, where no reducer answered the backward and nothing
in the source sees to it that ranks agree on inf, see infguards.py): site, grad (digest of the gradients as this rank looked through them).
Event "scaler" (first 64 steps): scale, site, given (update() was told a scale). Event "scaler_made": scale, enabled,
site. Event "scheduler" (first 400 steps of it): site, kind, last_epoch, lr, interval, opt
(its optimizer; -1: has not stepped so far), backwards (since the last optimizer step of any), metric (what a schedule that follows a metric is
given; null: it follows none), mode ("min" | "max", of such a one), made (the statement that made it), better (which way the name of what it is
given says that it improves, see metricnames.py).
Event "schedule_idle" (first 8 of a scheduler): site,
kind, id, lr, beside (optimizer that has stepped since this scheduler's last step, with parameters of the scheduler's optimizer, which has not),
made (the statement that made the scheduler).
"""

from __future__ import annotations

import math
import sys
import weakref
from typing import Any

from .. import clipped, digests, drained, infguards, marks, metricnames, sites
from ..patching import after, before
from ..state import S
from . import backward, steps

MAX_GRADS = 16
_unscaled: set[int] = set()
_nothing = [""]
_owner = [-1]
_loaded = [False]  # the scaler was given a state since the last update, other than that of a checkpoint at the start


def _before_clip(*args: Any, **kwargs: Any) -> None:
    backward.note_unclipped()
    given = args[0] if args else kwargs.get("parameters")
    _nothing[0] = drained.nothing_in(given)
    _owner[0] = clipped.owner(given) if S.steps < clipped.FIRST_STEPS else -1


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
        accumulated=0 if S.light else backward.num_since_zero(), no_sync=S.since.last_no_sync, backwards=S.since.num_backward,
        nothing=_nothing[0], opt=_owner[0], **({"stepped_inside": True} if steps.inside[0] else {}),
    )  # fmt: skip


def _after_clip_with_norm(_: Any, *args: Any, **kwargs: Any) -> None:
    """`clip_grads_with_norm_(parameters, max_norm, total_norm)`: the second half of clip_grad_norm_, with a norm that the script computed."""
    _after_clip(args[2] if len(args) > 2 else kwargs.get("total_norm"), *args, **kwargs)


def _after_scaler(result: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
    S.recorder.event("scaler_made", sites.here(4), scale=float(scaler.get_scale()), enabled=bool(scaler.is_enabled()))


def is_unscaled(optimizer: Any) -> bool:
    """Whether a scaler has taken its factor off these gradients, or has told the optimizer to do so (fused ones do)."""
    return id(optimizer) in _unscaled or getattr(optimizer, "grad_scale", None) is not None


def _before_unscale(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    if id(optimizer) not in _unscaled and not S.light and S.steps < 24:  # here the scaler looks for gradients that are not finite
        S.recorder.event("unscaled", sites.here(4), collectives=S.since.num_coll, reduced=S.since.num_reduce)
    _unscaled.add(id(optimizer))


def _after_unscale(result: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """The gradients that found_inf was decided by. Should another rank's be added to them before the step, that rank's inf went unseen."""
    site = sites.here(4)
    if S.since.num_reduce or S.light or S.steps >= 8 or not scaler.is_enabled() or infguards.any_guard(sites.stack(4)):
        return
    grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None and digests.plain(p.grad)][:MAX_GRADS]
    S.recorder.event("unscaled_grads", site, grad=digests.of_tensors(grads)[0])


def _after_loading(*args: Any, **kwargs: Any) -> None:
    _loaded[0] = S.steps > 0


def _after_update(result: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
    _unscaled.clear()
    if S.steps < 64:
        given = bool(args or kwargs) or _loaded[0]
        _loaded[0] = False
        S.recorder.event("scaler", sites.here(4), scale=float(scaler.get_scale()), enabled=bool(scaler.is_enabled()), given=given)


def _after_scheduler(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if not sites.is_user_code(sys._getframe(3).f_code):
        return  # a scheduler that steps others inside, or its own first step in the constructor
    S.sched_steps += 1
    optimizer = getattr(scheduler, "optimizer", None)
    group = optimizer.param_groups[0] if optimizer is not None and optimizer.param_groups else {}
    lr = group.get("lr")
    _look_for_idle(scheduler, optimizer, lr)
    site = sites.here(4)
    follows = hasattr(scheduler, "mode_worse")
    S.recorder.event(
        "scheduler", site, kind=type(scheduler).__name__, last_epoch=getattr(scheduler, "last_epoch", None), id=id(scheduler) % 1_000_003,
        opt=steps._known[id(optimizer)].opt if id(optimizer) in steps._known else -1,
        lr=float(lr) if isinstance(lr, (int, float)) else None, backwards=S.since.num_backward, metrics=isinstance(args[0], float) if args else False,
        metric=_metric(args[0] if args else kwargs.get("metrics")) if follows else None,
        mode=getattr(scheduler, "mode", "") if follows else "", made=sites.as_json(scheduler_made.get(scheduler, sites.UNKNOWN)) if follows else None,
        better=metricnames.better(*site[:2]) if follows else "",
    )  # fmt: skip


def _metric(value: Any) -> float | None:
    """A number, or a tensor of one element that is read without waiting for a device."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value.item()) if getattr(value, "is_cpu", False) and value.numel() == 1 else None


_last_step: weakref.WeakKeyDictionary[Any, tuple[int, int, int]] = weakref.WeakKeyDictionary()  # its optimizer's steps, all steps, told
MAX_IDLE = 8


def _look_for_idle(scheduler: Any, optimizer: Any, lr: Any) -> None:
    """Whether another optimizer has stepped the parameters of this scheduler's one since the scheduler's last step."""
    mark = marks.table.get(id(optimizer))
    if mark is None:
        return  # a wrapper that is no optimizer of torch's: its steps are not counted
    before = _last_step.get(scheduler)
    told = before[2] if before is not None else 0
    if before is not None and mark.num_steps == before[0] and S.steps > before[1] and told < MAX_IDLE:
        beside = _stepped_beside(optimizer)
        if beside >= 0:
            told += 1
            S.recorder.event(
                "schedule_idle", sites.here(5), kind=type(scheduler).__name__, id=id(scheduler) % 1_000_003, beside=beside,
                lr=float(lr) if isinstance(lr, (int, float)) else None, made=sites.as_json(scheduler_made.get(scheduler, sites.UNKNOWN)),
            )  # fmt: skip
    _last_step[scheduler] = (mark.num_steps, S.steps, told)


def _stepped_beside(optimizer: Any) -> int:
    """The optimizer that has stepped, shares a parameter and none of its groups (a wrapper hands its own on); -1: none."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    groups = {id(group) for group in optimizer.param_groups}
    for witness in list(steps._known.values()):
        other = witness.optimizer()
        if other is None or other is optimizer or own.isdisjoint(witness.ids):
            continue
        if groups.isdisjoint(id(group) for group in other.param_groups):
            return int(witness.opt)
    return -1


scheduler_made: weakref.WeakKeyDictionary[Any, sites.Site] = weakref.WeakKeyDictionary()


def _after_made(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    scheduler_made[scheduler] = sites.here(4)


def arm() -> None:
    import torch

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        before(torch.nn.utils.clip_grad, name, _before_clip)
        if after(torch.nn.utils.clip_grad, name, _after_clip):
            setattr(torch.nn.utils, name, getattr(torch.nn.utils.clip_grad, name))
    before(torch.nn.utils, "clip_grads_with_norm_", _before_clip)
    after(torch.nn.utils, "clip_grads_with_norm_", _after_clip_with_norm)
    after(torch.amp.GradScaler, "__init__", _after_scaler)
    before(torch.amp.GradScaler, "unscale_", _before_unscale)
    after(torch.amp.GradScaler, "unscale_", _after_unscale)
    before(torch.amp.GradScaler, "step", _before_unscale)  # a scaler of another kind has an unscale_ of its own
    after(torch.amp.GradScaler, "update", _after_update)
    after(torch.amp.GradScaler, "load_state_dict", _after_loading)
    scheduler = torch.optim.lr_scheduler
    after(scheduler.LRScheduler, "__init__", _after_made)
    after(scheduler.ReduceLROnPlateau, "__init__", _after_made)  # calls no constructor of its base
    for kind in list(vars(scheduler).values()):
        if isinstance(kind, type) and issubclass(kind, scheduler.LRScheduler) and "step" in vars(kind):
            after(kind, "step", _after_scheduler)
