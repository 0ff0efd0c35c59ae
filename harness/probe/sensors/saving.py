"""Checkpoints: torch.save, torch.load, load_state_dict, state_dict.

Event "save": path, keys (top level), prefixes (of tensor names), alias (saved tensors share memory with live parameters: always so, kept for the
reader), models (names of tensors, digests), begin (event before) or done.
Event "load": path, exists, map_location, weights_only, error; keys; devices.
Event "load_state": module, strict, missing, unexpected, matched, total, loaded (digest of the target afterwards), same_as_live.
Event "load_optimizer": kind, site. Event "load_scheduler": kind.
Event "kept_state": a state_dict kept by the script is the live one (same memory) although steps were taken since; see `check_kept`.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from typing import Any

from .. import digests, names, sites
from ..patching import before, quiet, wrap
from ..state import S

MAX_NAMES = 400


def _tensor_names(thing: Any, prefix: str = "", depth: int = 0) -> list[str]:
    """Dotted names of the tensors in a nested checkpoint."""
    found: list[str] = []
    if depth > 4 or not isinstance(thing, dict):
        return found
    for key, value in list(thing.items())[:2000]:
        if hasattr(value, "numel") and hasattr(value, "dtype"):
            found.append(str(key))
        elif isinstance(value, dict):
            found.extend(_tensor_names(value, f"{key}/", depth + 1))
    return found[:MAX_NAMES]


def _shape_of(thing: Any) -> dict[str, Any]:
    tensors = _tensor_names(thing)
    told: dict[str, Any] = {"kind": type(thing).__name__, "tensors": tensors[:200], "num_tensors": len(tensors)}
    if isinstance(thing, dict):
        told["keys"] = [str(k) for k in list(thing)[:60]]
        told["groups"] = {str(k): _role(k, v) for k, v in list(thing.items())[:60]}
    return told


def _role(key: Any, value: Any) -> str:
    """What an entry of a checkpoint is, by its content: a model, an optimizer, a scheduler, a scaler, a number."""
    if isinstance(value, dict):
        keys = set(map(str, value))
        if {"state", "param_groups"} <= keys:
            return "optimizer"
        if "last_epoch" in keys:
            return "scheduler"
        if {"scale", "growth_factor"} <= keys:
            return "scaler"
        if any(hasattr(v, "dtype") for v in value.values()):
            return "model"
        return "dict"
    if hasattr(value, "dtype"):
        return "tensor"
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def _path(f: Any) -> str:
    if isinstance(f, (str, os.PathLike)):
        return os.path.realpath(os.fspath(f))
    name = getattr(f, "name", None)
    return os.path.realpath(name) if isinstance(name, str) else ""


def _save(original: Any) -> Any:
    note = quiet(lambda obj, f, site, done: S.recorder.event("save", site, path=_path(f), done=done, **(_shape_of(obj) if not done else {})))

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        site = sites.here(2)
        note(obj, f, site, False)
        result = original(obj, f, *args, **kwargs)
        note(obj, f, site, True)
        return result

    return save


def _load(original: Any) -> Any:
    note = quiet(lambda site, **fields: S.recorder.event("load", site, **fields))

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        site = sites.here(2)
        where = kwargs.get("map_location", args[0] if args else None)
        note(site, path=_path(f), done=False, exists=os.path.exists(_path(f)) if _path(f) else True, map_location=None if where is None else str(where)[:80],
             weights_only=kwargs.get("weights_only"), began=time.time_ns())  # fmt: skip
        result = original(f, *args, **kwargs)
        note(site, path=_path(f), done=True, exists=True, map_location=None if where is None else str(where)[:80], **_shape_of(result))
        if isinstance(result, dict):
            _loaded.append((_path(f), {str(k): _role(k, v) for k, v in list(result.items())[:60]}))
            del _loaded[:-8]
        return result

    return load


_loaded: list[tuple[str, dict[str, str]]] = []


def _load_state(original: Any) -> Any:
    note = quiet(_note_load_state)

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        site = sites.here(2)
        strict = args[0] if args else kwargs.get("strict", True)
        own = list(self.state_dict(keep_vars=True)) if not S.recorder.disabled else []
        given = [str(k) for k in state_dict] if hasattr(state_dict, "keys") else []
        user = sites.is_user_code(sys._getframe(1).f_code)
        if user:
            note(self, own, given, bool(strict), site, False)
        result = original(self, state_dict, *args, **kwargs)
        if user:
            note(self, own, given, bool(strict), site, True)
        return result

    return load_state_dict


def _note_load_state(module: Any, own: list[str], given: list[str], strict: bool, site: sites.Site, done: bool) -> None:
    has, want = set(given), set(own)
    missing, unexpected = [k for k in own if k not in has], [k for k in given if k not in want]
    clean_given = {names.clean(k) for k in given}
    S.recorder.event(
        "load_state", site, module=type(module).__name__, strict=strict, done=done, missing=missing[:MAX_NAMES], unexpected=unexpected[:MAX_NAMES],
        num_missing=len(missing), num_unexpected=len(unexpected), matched=len(want & has), total=len(own), given=len(given),
        same_when_cleaned=len({names.clean(k) for k in missing} & clean_given),
        wrapped=type(module).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"),
    )  # fmt: skip


def _optimizer_load(original: Any) -> Any:
    note = quiet(_note_optimizer_load)

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        note(self, state_dict, sites.here(2))
        return original(self, state_dict, *args, **kwargs)

    return load_state_dict


def _note_optimizer_load(optimizer: Any, state_dict: Any, site: sites.Site) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    table, _ = names.owners(params)
    mismatched: list[str] = []
    for index, p in enumerate(params):
        state = (state_dict.get("state") or {}).get(index, {})
        for key, value in state.items():
            if hasattr(value, "shape") and value.dim() and tuple(value.shape) != tuple(p.shape):
                mismatched.append(f"{table.get(id(p), index)}:{key}")
    S.recorder.event(
        "load_optimizer", site, kind=type(optimizer).__name__, entries=len(state_dict.get("state") or {}), params=len(params), mismatched=mismatched[:50],
        names=[table.get(id(p), "") for p in params][:MAX_NAMES], shapes=[list(p.shape) for p in params][:MAX_NAMES],
    )  # fmt: skip


_kept: list[tuple[Any, int, sites.Site, int]] = []


class _Marker:
    """Rides in a state_dict's metadata, so that its life tells whether the script kept the dict."""

    __slots__ = ("__weakref__",)


def _after_state_dict(original: Any) -> Any:
    note = quiet(_note_state_dict)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if sites.is_user_code(sys._getframe(1).f_code):
            note(self, result, sites.here(2))
        return result

    return state_dict


def _note_state_dict(module: Any, result: Any, site: sites.Site) -> None:
    """Remember a dict whose tensors are the live parameters; a dict cannot be weakly referenced, an OrderedDict can."""
    try:
        ref = weakref.ref(result)
    except TypeError:
        return
    if len(_kept) < 64:
        _kept.append((ref, S.steps, site, id(module)))
    S.recorder.event("state_dict", site, module=type(module).__name__, prefixed=sum(1 for k in result if str(k).startswith(names.PREFIXES)), num=len(result))


def check_kept() -> None:
    """At a load and at the end: dicts that are still held and still alias the live weights after more steps were taken."""
    for ref, steps, site, _module in _kept:
        held = ref()
        if held is not None and S.steps > steps and len(held):
            S.recorder.event("kept_state", site, steps_before=steps, steps_now=S.steps, num=len(held))
    _kept.clear()


def _before_kept_load(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    for ref, steps, site, _module in list(_kept):
        held = ref()
        if held is not None and held is state_dict and S.steps > steps:
            S.recorder.event("loaded_alias", sites.here(4), kept_at=sites.as_json(site), steps_before=steps, steps_now=S.steps, num=len(held))


def arm() -> None:
    import torch

    wrap(torch.serialization, "save", _save)
    wrap(torch.serialization, "load", _load)
    torch.save, torch.load = torch.serialization.save, torch.serialization.load
    before(torch.nn.Module, "load_state_dict", _before_kept_load)
    wrap(torch.nn.Module, "load_state_dict", _load_state)
    wrap(torch.optim.Optimizer, "load_state_dict", _optimizer_load)
    wrap(torch.nn.Module, "state_dict", _after_state_dict)
    scheduler = torch.optim.lr_scheduler.LRScheduler
    before(scheduler, "load_state_dict", lambda self, *a, **k: S.recorder.event("load_scheduler", sites.here(4), kind=type(self).__name__))
    before(torch.amp.GradScaler, "load_state_dict", lambda self, *a, **k: S.recorder.event("load_scaler", sites.here(4)))


_ = digests
