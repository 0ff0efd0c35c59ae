"""Checkpoint files: torch.save and torch.load.

Event "save" (before and after): site, path (real; "" for a buffer), done, error; before: what `shape_of` says.
Event "load" (before, and after it succeeded or failed): site, path, done, exists, error, error_type, map_location, weights_only,
newest (before the first 4 of a statement: see siblings.py), and after it what `shape_of` says, locations {storage tag: number} as saved,
device (this process's own), savers [{line, text, same}] of a load that failed: the calls of torch.save in the same file, and whether they
name the same path expression. After 256 loads of a process only failures are told.
Event "reload" (at 32, 64, 128, ... loads of one file by one statement): site, path, num, took_s (all of them), steps (in how many steps).
`shape_of`: kind, keys, groups {key: role}, numbers {key: value}, tensors (names, first 400), num_tensors; after a load (first 4 of a
statement) shapes, digests of these tensors, here {name: digests that parameters of this name have in the models that there are}.
What is loaded into what stands in states.py.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

from .. import digests, names, protocol, siblings, sites, syntax
from ..patching import quiet, wrap
from ..state import S

MAX_NAMES, MAX_INNER = 400, 60
PROGRESS = re.compile(
    r"(?!max|min|num|total|every|warmup|log|save|eval)(?!\w*per_)\w*(epoch|step|iter|iteration|round|best)(_?(idx|index|acc|accuracy|loss|score|metric))?$",
    re.IGNORECASE,
)
MAX_WALKED = 20_000
MAX_REMEMBERED = 4_000  # tensors of one load; about 1 us each
_MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "max_exp_avg_sq"}
_loaded: list[tuple[str, dict[int, tuple[weakref.ref[Any], str]]]] = []  # (path, its tensors and their names) of the last loads
_locations: dict[str, int] = {}
MAX_LOADS = 256
_num_loads = [0]
_weighed: dict[tuple[str, int], int] = {}
MAX_WEIGHED = 4  # loads of one statement whose tensors are looked at
_again: dict[tuple[str, sites.Site], Reloads] = {}
at_save: list[Any] = []  # sensors that look at what is about to be saved: (object, site, path)
at_saved: list[Any] = []  # and once it is: (site, path)


def walk(thing: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """(dotted name, tensor) of a nested checkpoint; dicts, lists and tuples to a depth of five."""
    if depth > 5:
        return
    if isinstance(thing, dict):
        items: Any = list(thing.items())
    elif isinstance(thing, (list, tuple)):
        items = list(enumerate(thing))
    else:
        return
    for key, value in items[:MAX_WALKED]:
        name = f"{prefix}{key}"
        if hasattr(type(value), "data_ptr"):
            yield name, value
        elif isinstance(value, (dict, list, tuple)):
            yield from walk(value, f"{name}/", depth + 1)


def shape_of(thing: Any) -> dict[str, Any]:
    """What a checkpoint is made of."""
    found = [name for name, _ in walk(thing)]
    told: dict[str, Any] = {"kind": type(thing).__name__, "tensors": found[:MAX_NAMES], "num_tensors": len(found)}
    if isinstance(thing, dict):
        entries = list(thing.items())[:60]
        told["keys"] = [str(k) for k, _ in entries]
        told["groups"] = {str(k): _role(v) for k, v in entries}
        told["numbers"] = _numbers(entries)
    return told


def _numbers(entries: list[tuple[Any, Any]]) -> dict[str, Any]:
    """By their name; one level deeper, `{"progress": {"epoch": 3}}`, what is called as progress is: options are kept there as well."""
    nested = [value for _, value in entries if isinstance(value, dict) and _role(value) == "dict"]
    inner = [(k, v) for value in nested for k, v in list(value.items())[:MAX_INNER] if PROGRESS.match(str(k))]
    return {str(k): v for k, v in (*inner, *entries) if type(v) in (int, float)}


def _role(value: Any) -> str:
    """What an entry of a checkpoint is, by its content: a model, an optimizer, a scheduler, a scaler, a number."""
    if isinstance(value, dict):
        keys = set(map(str, value))
        if {"state", "param_groups"} <= keys:
            return "optimizer"
        if "last_epoch" in keys:
            return "scheduler"
        if {"scale", "growth_factor"} <= keys:
            return "scaler"
        if any(isinstance(v, dict) and _MOMENTS & set(map(str, v)) for v in value.values()):
            return "optimizer"  # its state without the groups, by name
        return "model" if any(hasattr(type(v), "data_ptr") for v in value.values()) else "dict"
    if hasattr(type(value), "data_ptr"):
        return "tensor"
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def path_of(f: Any) -> str:
    """The real path behind a path or an open file; "" for a buffer, and for a member of an archive, which bears the archive's name."""
    if isinstance(f, (str, os.PathLike)):
        return os.path.realpath(os.fsdecode(f))
    name = getattr(f, "name", None)
    return os.path.realpath(name) if isinstance(name, str) and _has_descriptor(f) else ""


def _has_descriptor(f: Any) -> bool:
    try:
        return isinstance(f.fileno(), int)
    except (AttributeError, OSError, ValueError):
        return False


def _save(original: Any) -> Any:
    note = quiet(_note_save)

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        site = sites.here(2)
        note(f, site, obj)
        before = S.recorder.phase(protocol.SAVING)  # to a file server it may take minutes without any CPU: no hang
        try:
            result = original(obj, f, *args, **kwargs)
        except BaseException as error:
            note(f, site, error=error)
            raise
        finally:
            S.recorder.phase(before)
        note(f, site)
        return result

    return save


def _note_save(f: Any, site: sites.Site, obj: Any = None, error: BaseException | None = None) -> None:
    what = {} if obj is None else shape_of(obj)
    for look in at_save if obj is not None else ():
        look(obj, site, path_of(f))
    for told in at_saved if obj is None else ():
        told(site, path_of(f))
    S.recorder.event("save", site, path=path_of(f), done=obj is None and error is None, error=repr(error)[:300] if error else "", **what)


class Reloads:
    """How often one statement has loaded one file."""

    __slots__ = ("num", "step", "steps", "took_s")

    def __init__(self) -> None:
        self.num = self.steps = 0
        self.step = -1
        self.took_s = 0.0


def note_reload(f: Any, site: sites.Site, took_s: float) -> None:
    path = path_of(f)
    if not path or (len(_again) >= MAX_LOADS and (path, site) not in _again):
        return
    one = _again.setdefault((path, site), Reloads())
    one.num += 1
    one.took_s += took_s
    one.steps += S.steps != one.step
    one.step = S.steps
    if one.num >= 32 and one.num & (one.num - 1) == 0:
        S.recorder.event("reload", site, path=path, num=one.num, took_s=round(one.took_s, 6), steps=one.steps)


def _load(original: Any) -> Any:
    before, after, failed, reload = quiet(_before_load), quiet(_after_load), quiet(_failed_load), quiet(note_reload)

    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        site = sites.here(2)
        _num_loads[0] += 1
        told = before(f, args, kwargs, site) if _num_loads[0] <= MAX_LOADS else None
        began = time.perf_counter()
        try:
            result = original(f, *args, **kwargs)
        except BaseException as error:
            failed(f, error, site, told)
            raise
        reload(f, site, time.perf_counter() - began)
        if told is not None:
            after(f, result, site, told)
        return result

    return load


def _before_load(f: Any, args: Any, kwargs: Any, site: sites.Site) -> dict[str, Any]:
    where = args[0] if args else kwargs.get("map_location")
    told = {"map_location": None if where is None else str(where)[:80], "weights_only": kwargs.get("weights_only")}
    path = path_of(f)
    _locations.clear()
    look = path and _weighed.get(site[:2], 0) < MAX_WEIGHED and not _base_in_argv(path)
    newest = siblings.newest(path) if look else ""
    newest = newest if newest and siblings.are_sorted() else ""
    S.recorder.event("load", site, path=path, done=False, exists=os.path.exists(path) if path else True, newest=newest, **told)
    return told


def _after_load(f: Any, result: Any, site: sites.Site, told: dict[str, Any] | None) -> None:
    path = path_of(f)
    S.recorder.event(
        "load",
        site,
        path=path,
        done=True,
        exists=True,
        error="",
        locations=dict(_locations),
        device=_device(),
        **(told or {}),
        **shape_of(result),
        **_weights(result, site),
    )
    refs: dict[int, tuple[weakref.ref[Any], str]] = {}
    for name, tensor in walk(result):
        if len(refs) < MAX_REMEMBERED:
            refs[id(tensor)] = (weakref.ref(tensor), name)
    _loaded.append((path, refs))
    del _loaded[:-8]


def _weights(result: Any, site: sites.Site) -> dict[str, Any]:
    """Shapes and digests of the first tensors that could be weights: whether they come to stand in a model. About 3 us each."""
    _weighed[site[:2]] = _weighed.get(site[:2], 0) + 1
    if _weighed[site[:2]] > MAX_WEIGHED:
        return {}
    found = list(walk(result))[:MAX_NAMES]
    tensors = [t for _, t in found]
    wanted = {names.clean(name.rsplit("/", 1)[-1]) for name, _ in found}
    own = [(names.clean(n), p) for root in names.root_modules() for n, p in root.named_parameters()][:MAX_WALKED]
    own = [(n, p) for n, p in own if n in wanted][:MAX_REMEMBERED]
    here: dict[str, list[int]] = {}
    for (name, _), digest in zip(own, digests.of_tensors([p for _, p in own])[1], strict=True):
        here.setdefault(name, []).append(digest)
    return {"shapes": [list(t.shape) for t in tensors], "digests": digests.of_tensors(tensors)[1], "here": here}


def _failed_load(f: Any, error: BaseException, site: sites.Site, told: dict[str, Any] | None) -> None:
    path = path_of(f)
    S.recorder.event(
        "load", site, path=path, done=True, exists=os.path.exists(path) if path else True, error=str(error)[:600] or repr(error),
        error_type=type(error).__name__,
        size=os.path.getsize(path) if path and os.path.isfile(path) else -1, savers=_savers(site), given=_base_in_argv(path),
        locations=dict(_locations),
        device=_device(), **(told or {}),
    )  # fmt: skip


def _base_in_argv(path: str) -> bool:
    """Whether the user named the file on the command line."""
    return bool(path) and any(os.path.basename(path) in str(a) for a in sys.argv[1:])


def _savers(site: sites.Site) -> list[dict[str, Any]]:
    """Calls of torch.save in the file of a load that failed. Only then: parsing costs some ms."""
    tree = syntax.tree(site[0])
    calls = [node for node in (syntax.nodes(tree) if tree is not None else ()) if isinstance(node, ast.Call) and node.args]
    wanted = {ast.unparse(c.args[0]) for c in calls if _called(c) == "load" and c.lineno <= site[1] <= (c.end_lineno or c.lineno)}
    saves = [c for c in calls if _called(c) == "save" and len(c.args) > 1]
    return [{"line": c.lineno, "text": sites.text((site[0], c.lineno, "")), "same": ast.unparse(c.args[1]) in wanted} for c in saves[:20]]


def _called(call: ast.Call) -> str:
    """ "save" for torch.save(...), "load" for torch.load(...); else ""."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "torch" else ""


def origin_of(tensor: Any) -> tuple[str, str]:
    """(path of the file that this very tensor was loaded from, its name there); empty if none."""
    for path, refs in reversed(_loaded):
        found = refs.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return path, found[1]
    return "", ""


def source_of(tensors: Any) -> str:
    """Path of the file that one of these tensors was loaded from; "" if none."""
    return next((path for t in tensors if (path := origin_of(t)[0])), "")


def _device() -> str:
    """Where this process works, without touching a device that it has not touched."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return f"cuda:{torch.cuda.current_device()}"
    return "cpu"


def _restore(original: Any) -> Any:
    """torch asks this for the function that puts a storage where it was saved, or where map_location says."""

    def _get_restore_location(map_location: Any) -> Any:
        inner = original(map_location)

        def restore(storage: Any, location: Any) -> Any:
            tag = str(location)[:40]
            _locations[tag] = _locations.get(tag, 0) + 1
            return inner(storage, location)

        return restore

    return _get_restore_location


def arm() -> None:
    import torch

    wrap(torch.serialization, "save", _save)
    wrap(torch.serialization, "load", _load)
    wrap(torch.serialization, "_get_restore_location", _restore)
    torch.save, torch.load = torch.serialization.save, torch.serialization.load
