"""State dicts: what is read out of models and optimizers, what is put back, and which kept ones are the live weights.

Event "state_dict" (user calls, first 400): site, module, num, token.
Event "load_state": site, module, mid (id of the module), strict, error, missing, unexpected, missing_shapes, unexpected_shapes (first 400
each), num_missing, num_unexpected, matched, total, given, same_when_cleaned, self_names (given tensors that are the module's own memory),
num_self, num_given_tensors, fresh (one of them was read out in this very step), filled (and something was written into them since), replaced
(others were loaded into the module since it was read out), kept_at (where), source (path of the file it was loaded from), ddp (index of the wrap
event that covers the module; -1),
weights, had (digests of the parameters that are given, and of the module's own before; 0 where they are not looked at), came (names in
the file of the unexpected tensors; "" for one that is of no file).
Event "blank_stats": site (of the load), names, source, module: running statistics that a load left out although it gave the weights of
their layer, as they were made (mean 0) when the module was called in eval mode.
Event "saved_dicts" (first 100): site, path, tokens: the state dicts (see "state_dict") whose tensors are in a file.
Event "state_held" (first 40): site, steps_before: the dict that this line gave out last is still held although the weights moved since.
Event "optimizer_state" (user calls): site, kind, names, shapes,
digests (of each parameter's first state tensor, by position). Event "load_optimizer": site, kind, entries, params, mismatched, names,
shapes, digests (of what is given), lr (first group's, as given), given_names, came (names in the file
that the state tensors were loaded from), source, had_state, counts_on (the entry of the file by which a loop is bounded, see counting.py), cyclic (the
source may make a rate that comes again and again, see cycles.py).
Event "scheduler_made": site, kind, last_epoch, id, totals (see
lengths.py), asked (len() of a loader so far). Event "load_scheduler": site,
kind, last_epoch, foreign (first keys of a dict that holds nothing of the scheduler's).
Event "load_scaler": site. Event "alias_used": site, how ("load" | "save"), token, kept_at, steps_before, steps_now,
changed (the weights moved in between), same_module, path: a state dict that was read out at an earlier step, whose tensors are still the
live weights; torn: the weights were stepped, by another thread, while the file was being written.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

from .. import counting, cycles, digests, leftunused, names, sites
from ..patching import after, before, quiet, wrap
from ..state import S
from . import blanks, ddp, lengths, saving, steps

MAX_NAMES = 400
MAX_TRACKED = 8  # tensors of one state dict; a filtered copy of it holds some of them
MAX_WEIGHTS = 1000  # parameters of a load whose values are looked at
MAX_READ = 40  # state_dict() calls of one line that are told: at which steps the weights were kept
MAX_SAME = 8  # clean loads from one line that are told in full; a loop that syncs two models at every step makes thousands
at_read: list[Any] = []  # sensors that are told where the script reads out a model's state
before_load: list[Any] = []  # sensors that are told of a load that is about to be made: (module, state dict, site)
at_loaded: list[Any] = []  # sensors that are told of a load that went well: (module, site, what the event says)
_counts = {"state_dict": 0, "optimizer_state": 0}
_told_at: dict[tuple[str, int], int] = {}  # clean events of a line so far


class Capture:
    """One state_dict() that the user's code called: weak references, so that nothing is kept alive."""

    __slots__ = ("digest", "module", "refs", "site", "steps", "token")

    def __init__(self, token: int, site: sites.Site, module: Any, tensors: list[Any]) -> None:
        self.token, self.site, self.steps, self.module = token, site, S.steps, id(module)
        self.refs = [weakref.ref(t) for t in tensors]
        # reading device memory waits for the device: not in a loop that syncs two models at every step
        watch = all(t.device.type == "cpu" for t in tensors) or _told_at.get(site[:2], 0) < MAX_SAME
        self.digest = digests.of_tensors(tensors)[0] if watch else 0

    def changed(self) -> bool:
        """Whether the weights moved since; taken for granted where they were not looked at."""
        return not self.digest or digests.of_tensors([ref() for ref in self.refs])[0] != self.digest


_loaded_at: dict[int, int] = {}  # id of a module -> how many state dicts had been read out when it was last given other weights
_captured: dict[int, tuple[weakref.ref[Any], Capture]] = {}  # id of a tensor object -> itself, the dict it was made for


def _capture_of(tensor: Any) -> Capture | None:
    found = _captured.get(id(tensor))
    return found[1] if found is not None and found[0]() is tensor else None


# ---- models ----
def _state_dict(original: Any) -> Any:
    note = quiet(_note_state_dict)

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if sites.is_user_code(sys._getframe(1).f_code):
            note(self, result, sites.here(2))
        return result

    return state_dict


def _note_state_dict(module: Any, result: Any, site: sites.Site) -> None:
    import torch

    _counts["state_dict"] += 1
    token = _counts["state_dict"]
    if len(_captured) > 1024:
        for key in [k for k, (ref, _) in _captured.items() if ref() is None]:
            del _captured[key]
    # keep_vars gives the parameters themselves, which live on for a reason of their own
    plain = [t for t in result.values() if type(t) is torch.Tensor and not t.requires_grad and t.dim()]
    tensors = plain[:: -(-len(plain) // MAX_TRACKED) or 1]  # spread over the model: its first layers may be frozen
    capture = Capture(token, site, module, tensors) if tensors and len(_captured) < 4096 else None
    if capture is not None:
        _captured.update({id(t): (ref, capture) for t, ref in zip(tensors, capture.refs, strict=True)})
    _told_at[site[:2]] = _told_at.get(site[:2], 0) + 1
    _look_at_last(site, capture)
    for look in at_read:
        look(site)
    if token <= 400 and _told_at[site[:2]] <= MAX_READ:
        told = {"unused": True} if leftunused.told(site) else {}
        S.recorder.event("state_dict", site, module=type(module).__name__, num=len(result), token=token, **told)


def _look_at_last(site: sites.Site, capture: Capture | None) -> None:
    """The dict that this line gave out last is still held, although the weights have moved since: it is kept for later."""
    last = _last_at.pop(site[:2], None)
    if capture is not None and len(_last_at) < 64:
        _last_at[site[:2]] = capture
    if last is not None and last.steps < S.steps and any(ref() is not None for ref in last.refs):
        _counts["held"] = _counts.get("held", 0) + 1
        if _counts["held"] <= 40 and last.changed():
            S.recorder.event("state_held", site, steps_before=last.steps)


_last_at: dict[tuple[str, int], Capture] = {}


def keep(tensors: list[Any], site: sites.Site) -> None:
    """Live weights, under tensor objects of their own (`detach()`, `.data`), that are handed to another thread here."""
    new = [t for t in tensors if _capture_of(t) is None]
    if new and len(_captured) < 4096:
        _counts["state_dict"] += 1
        capture = Capture(_counts["state_dict"], site, None, new[:: -(-len(new) // MAX_TRACKED) or 1])
        _captured.update({id(t): (weakref.ref(t), capture) for t in new})


def _alias_used(how: str, tensors: list[Any], site: sites.Site, module: Any = None, path: str = "") -> None:
    told: set[int] = set()
    for tensor in tensors:
        capture = _capture_of(tensor)
        if capture is None or capture.steps >= S.steps or capture.token in told:
            continue
        told.add(capture.token)
        S.recorder.event(
            "alias_used", site, how=how, token=capture.token, kept_at=sites.as_json(capture.site), steps_before=capture.steps,
            steps_now=S.steps,
            changed=capture.changed(), same_module=id(module) == capture.module, path=path,
        )  # fmt: skip


def _at_save(thing: Any, site: sites.Site, path: str) -> None:
    tensors = [t for _, t in saving.walk(thing)]
    _alias_used("save", tensors, site, path=path)
    tokens = sorted({c.token for t in tensors if (c := _capture_of(t)) is not None})
    _counts["saved"] = _counts.get("saved", 0) + bool(tokens)
    if tokens and _counts["saved"] <= 100:
        S.recorder.event("saved_dicts", site, path=path, tokens=tokens[:20])
    if threading.current_thread() is not threading.main_thread():  # a file that the training thread writes is of one step
        live = steps.weights()
        mine = [t for t in tensors if digests.address(t) in live]
        if mine:
            _under_save[threading.get_ident()] = Capture(0, site, None, mine[:: -(-len(mine) // MAX_TRACKED) or 1])


_under_save: dict[int, Capture] = {}  # thread -> the live weights that it is writing


def _saved(site: sites.Site, path: str) -> None:
    capture = _under_save.pop(threading.get_ident(), None)
    if capture is None or capture.steps >= S.steps or not capture.changed():
        return
    kept = next((c for ref in capture.refs if (t := ref()) is not None and (c := _capture_of(t)) is not None), capture)
    S.recorder.event(
        "alias_used", site, how="save", token=-threading.get_ident(), kept_at=sites.as_json(kept.site), steps_before=capture.steps,
        steps_now=S.steps, changed=True, torn=True, same_module=False, path=path,
    )  # fmt: skip


def _load_state(original: Any) -> Any:
    look, note = quiet(_look_at_load), quiet(_note_load_state)

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        if not sites.is_user_code(sys._getframe(1).f_code):
            return original(self, state_dict, *args, **kwargs)
        site = sites.here(2)
        strict = bool(args[0] if args else kwargs.get("strict", True))
        told = look(self, state_dict, strict, site)
        try:
            result = original(self, state_dict, *args, **kwargs)
        except BaseException as error:
            note(self, site, told, error)
            raise
        note(self, site, told, None)
        return result

    return load_state_dict


def _look_at_load(module: Any, state_dict: Any, strict: bool, site: sites.Site) -> dict[str, Any] | None:
    """Before the load, while what is given can still be told from what is there. About 2 us a tensor."""
    if not hasattr(state_dict, "keys"):
        return None
    for ask in before_load:
        ask(module, state_dict, site)
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    given = {str(k): v for k, v in dict(state_dict).items()}
    tensors = [t for t in given.values() if hasattr(type(t), "data_ptr")]
    missing, unexpected = [k for k in own if k not in given], [k for k in given if k not in own]
    mine = {k for k, v in own.items() if _same_memory(given.get(k), v)}
    _alias_used("load", tensors, site, module)
    weights, had = _weights(given, own) if _told_at.get((site[0] + "<", site[1]), 0) < MAX_SAME else (0, 0)
    captures = [c for t in tensors if (c := _capture_of(t)) is not None]
    blanks.look(module, own, given, missing, site)
    return {
        "strict": strict, "missing": missing[:MAX_NAMES], "unexpected": unexpected[:MAX_NAMES], "num_missing": len(missing),
        "num_unexpected": len(unexpected),
        "missing_shapes": [_shape(own[k]) for k in missing[:MAX_NAMES]],
        "unexpected_shapes": [_shape(given[k]) for k in unexpected[:MAX_NAMES]],
        "came": [saving.origin_of(given[k])[1] if hasattr(type(given[k]), "data_ptr") else "" for k in unexpected[:MAX_NAMES]],
        "matched": len(own) - len(missing), "total": len(own), "given": len(given), "num_given_tensors": len(tensors),
        "same_when_cleaned": len({names.clean(k) for k in missing} & {names.clean(k) for k in given}),
        "self_names": sorted(mine)[:MAX_NAMES], "num_self": len(mine), "fresh": any(c.steps == S.steps for c in captures),
        "filled": bool(mine) and any(c.changed() for c in {id(c): c for c in captures if c.steps == S.steps}.values()),
        "replaced": any(0 < c.token <= _loaded_at.get(id(module), 0) for c in captures),
        "weights": weights, "had": had, "source": saving.source_of(tensors), "kept_at": sites.as_json(captures[0].site) if captures else None,
    }  # fmt: skip


def _weights(given: dict[str, Any], own: dict[str, Any]) -> tuple[int, int]:
    """Digests of the parameters that are given and of those they replace: without buffers, which may differ by rank. About 3 us each."""
    import torch

    keys = [k for k, v in own.items() if isinstance(v, torch.nn.Parameter) and digests.plain(v) and hasattr(type(given.get(k)), "data_ptr")]
    keys = [k for k in keys if digests.plain(given[k])][:MAX_WEIGHTS]
    return (digests.of_tensors([given[k] for k in keys])[0], digests.of_tensors([own[k] for k in keys])[0]) if keys else (0, 0)


def _same_memory(given: Any, own: Any) -> bool:
    """Of plain tensors: a sharded or fake one has no memory of its own to compare."""
    if not hasattr(type(given), "data_ptr") or not digests.plain(given) or not digests.plain(own):
        return False
    return bool(given.device == own.device and given.data_ptr() == own.data_ptr() and given.shape == own.shape)


def _shape(value: Any) -> list[int] | None:
    return list(value.shape) if hasattr(type(value), "data_ptr") else None


def _note_load_state(module: Any, site: sites.Site, told: dict[str, Any] | None, error: BaseException | None) -> None:
    if error is None and told is not None and not told["num_self"] and len(_loaded_at) < 64:
        _loaded_at[id(module)] = _counts["state_dict"]
    for look in at_loaded if error is None and told is not None else ():
        look(module, site, told)
    key = site[0] + "<", site[1]
    if error is None and told is not None and not told["num_missing"] and not told["num_unexpected"] and not told["num_self"]:
        _told_at[key] = _told_at.get(key, 0) + 1
        if _told_at[key] > MAX_SAME:
            return
    param = next(iter(module.parameters()), None)
    S.recorder.event(
        "load_state", site, module=type(module).__name__, mid=id(module), error="" if error is None else str(error)[:2000], **(told or {}),
        ddp=-1 if param is None else ddp.wrap_of(param),
        wrapped=type(module).__name__ in ("DistributedDataParallel", "DataParallel", "OptimizedModule"),
        training=module.training,
    )  # fmt: skip


# ---- optimizers ----
def _first_tensors(state_dict: Any, num: int) -> list[Any]:
    """The first state tensor that has dimensions, of each parameter by position."""
    state = state_dict.get("state") or {}
    found: list[Any] = []
    for index in range(min(num, MAX_NAMES)):
        entry = state.get(index)
        values = entry.values() if isinstance(entry, dict) else ()
        found.append(next((v for v in values if hasattr(type(v), "data_ptr") and v.dim()), None))
    return found


def _params_of(optimizer: Any) -> tuple[list[Any], list[str]]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    table, _ = names.owners(params)
    return params, [table.get(id(p), "") for p in params][:MAX_NAMES]


def _after_optimizer_state(result: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    site = sites.here(4)
    _counts["optimizer_state"] += 1
    if _counts["optimizer_state"] > 100 or not isinstance(result, dict):
        return
    params, told = _params_of(optimizer)
    S.recorder.event(
        "optimizer_state", site, kind=type(optimizer).__name__, names=told, shapes=[list(p.shape) for p in params][:MAX_NAMES],
        digests=digests.of_tensors(_first_tensors(result, len(params)))[1],
    )  # fmt: skip


def _note_optimizer_load(optimizer: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    site = sites.here(4)
    params, told = _params_of(optimizer)
    firsts = _first_tensors(state_dict, len(params))
    bad = [
        i for i, (p, t) in enumerate(zip(params, firsts, strict=False)) if t is not None and t.shape != p.shape and t.numel() != p.numel()
    ]
    given = [str(n) for group in state_dict.get("param_groups") or () for n in group.get("param_names") or ()]
    S.recorder.event(
        "load_optimizer", site, kind=type(optimizer).__name__, oid=id(optimizer), entries=len(state_dict.get("state") or {}),
        params=len(params),
        mismatched=[told[i] or str(i) for i in bad][:50], names=told, shapes=[list(p.shape) for p in params][:MAX_NAMES],
        digests=digests.of_tensors(firsts)[1],
        given_names=[names.clean(n) for n in given][:MAX_NAMES], source=saving.source_of([t for t in firsts if t is not None]),
        came=["" if t is None else saving.origin_of(t)[1] for t in firsts],
        had_state=len(optimizer.state), lr=_first_lr(state_dict), counts_on=counting.counts_on(site), cyclic=cycles.of_rates(),
    )  # fmt: skip


def _first_lr(state_dict: Any) -> float | None:
    lr = (state_dict.get("param_groups") or [{}])[0].get("lr")
    return float(lr) if isinstance(lr, (int, float)) or (hasattr(lr, "is_cpu") and lr.is_cpu) else None


# ---- schedulers and scalers ----
def _after_scheduler(result: Any, self: Any, optimizer: Any = None, *args: Any, **kwargs: Any) -> None:
    S.recorder.event(
        "scheduler_made", sites.here(4), kind=type(self).__name__, last_epoch=_number(getattr(self, "last_epoch", None)), id=id(self) % 1_000_003,
        totals=lengths.of_scheduler(self)[:16], asked=lengths.asked[0],
    )  # fmt: skip


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _note_scheduler_load(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    last = state_dict.get("last_epoch") if isinstance(state_dict, dict) else None
    keys = [str(k) for k in state_dict][:20] if isinstance(state_dict, dict) else []
    foreign = "param_groups" in keys or (bool(keys) and not any(k in vars(self) for k in keys))
    S.recorder.event("load_scheduler", sites.here(4), kind=type(self).__name__, last_epoch=_number(last), foreign=keys[:6] if foreign else [])


def arm() -> None:
    import torch
    from torch.optim import lr_scheduler

    saving.at_save.append(_at_save)
    saving.at_saved.append(_saved)
    wrap(torch.nn.Module, "load_state_dict", _load_state)
    wrap(torch.nn.Module, "state_dict", _state_dict)
    before(torch.optim.Optimizer, "load_state_dict", _note_optimizer_load)
    after(torch.optim.Optimizer, "state_dict", _after_optimizer_state)
    after(lr_scheduler.LRScheduler, "__init__", _after_scheduler)
    for kind in [v for v in vars(lr_scheduler).values() if isinstance(v, type) and issubclass(v, lr_scheduler.LRScheduler)]:
        if "load_state_dict" in vars(kind):
            before(kind, "load_state_dict", _note_scheduler_load)
    before(torch.amp.GradScaler, "load_state_dict", lambda self, *a, **k: S.recorder.event("load_scaler", sites.here(4)))
