"""Objects that were given a checkpoint's state, were not used, and are gone by the second step, while one like them was made since.

Event "restored_lost": site (of the load), what ("module" | "optimizer"), kind, num (tensors or parameters), rebuilt (where the other one was
made: in the innermost function that the load ran in, too), trained (the other one's parameters are in an optimizer), source.
Watched from such a load to the second step after it, at most MAX_WATCHED loads a process: calls of modules, `state_dict()`, `parameters()`.
Weak references only. What took over the loaded values (a copy, an average, a child put into another model) keeps this silent: their tensors
are alive, were read, or a living module has the same values.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import digests, lineage, marks, names, sites, syntax
from ..patching import after, before, quiet, wrap
from ..state import S
from . import saving, states, steps

MAX_WATCHED, MAX_INSIDE, MAX_CALLS, MAX_MADE = 16, 2000, 20_000, 1000


class Restored:
    """What a load gave state to."""

    def __init__(self, thing: Any, what: str, site: sites.Site, source: str) -> None:
        self.ref, self.what, self.kind, self.site, self.source = weakref.ref(thing), what, type(thing).__name__, site, source
        self.stack, self.steps, self.used = sites.stack(3, 8), S.steps, False
        self.num, self.digest, self.made_at = 0, 0, lineage.made_at(thing) if what == "module" else None
        self.shapes: list[list[int]] = []
        self.tensors: list[weakref.ref[Any]] = []


class Made:
    """A module or an optimizer that was made since the first of them."""

    def __init__(self, thing: Any) -> None:
        self.ref, self.stack, self.loaded = weakref.ref(thing), sites.stack(3, 8), False


_watched: list[Restored] = []
_inside: dict[int, tuple[weakref.ref[Any], Restored]] = {}
_made: list[Made] = []
_hook: list[Any] = []
_counts = {"watched": 0, "calls": 0}


def _watch(one: Restored) -> None:
    _counts["watched"] += 1
    _watched.append(one)
    if one.what == "module" and not _hook and not S.compiling:
        import torch

        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(_called))


def _after_load(module: Any, site: sites.Site, told: dict[str, Any]) -> None:
    """A model was given all of its weights by a file, and they are others than it had."""
    inner = {id(m) for m in module.modules()} if _made else set()
    for made in _made:
        made.loaded = made.loaded or id(made.ref()) in inner
    if not told["source"] or told["num_missing"] or told["weights"] == told["had"] or _counts["watched"] >= MAX_WATCHED or S.compiling:
        return
    one = Restored(module, "module", site, told["source"])
    params = list(module.parameters())
    one.num, one.shapes, one.digest = len(params), lineage.shapes(module), _digest(module)
    one.tensors = [weakref.ref(p) for p in params[:64]]
    if one.num:
        _inside.update({id(m): (weakref.ref(m), one) for m in list(module.modules())[: MAX_INSIDE - len(_inside)]})
        _watch(one)


def _after_optimizer_load(result: Any, optimizer: Any, state_dict: Any = None, *args: Any, **kwargs: Any) -> None:
    for made in _made:
        made.loaded = made.loaded or made.ref() is optimizer
    state = state_dict.get("state") if isinstance(state_dict, dict) else None
    tensors = [v for entry in list((state or {}).values())[:8] if isinstance(entry, dict) for v in entry.values() if hasattr(type(v), "data_ptr")]
    source = saving.source_of(tensors)
    if source and _counts["watched"] < MAX_WATCHED:
        one = Restored(optimizer, "optimizer", sites.here(4), source)
        one.num = sum(len(g["params"]) for g in optimizer.param_groups)
        _watch(one)


def _called(module: Any, args: Any) -> None:
    found = _inside.get(id(module))
    if found is not None and found[0]() is module:
        found[1].used = True
    _counts["calls"] += 1
    if _counts["calls"] > MAX_CALLS:
        _end()


def _read(module: Any) -> None:
    for inner in module.modules():
        found = _inside.get(id(inner))
        if found is not None and found[0]() is inner:
            found[1].used = True


def _reading(original: Any) -> Any:
    look = quiet(_read)  # not entered where a sensor reads

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _inside:
            look(self)
        return original(self, *args, **kwargs)

    return read


def _after_made(result: Any, thing: Any, *args: Any, **kwargs: Any) -> None:
    if _watched and len(_made) < MAX_MADE:
        _made.append(Made(thing))


def _after_optimizer_read(result: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    for one in _watched:
        one.used = one.used or one.ref() is optimizer


def _at_step(optimizer: Any) -> None:
    if not _watched:
        return
    _after_optimizer_read(None, optimizer)
    for one in _watched:
        if one.steps == S.steps and not one.used and one.what == "module" and one.ref() is None:
            one.used = any(_digest(m) == one.digest for m in _alike(one))  # before that step trains a copy of it
    if S.steps > min(one.steps for one in _watched):
        _judge()
        _end()


def _judge() -> None:
    for one in _watched:
        if one.used or one.ref() is not None or any(t() is not None for t in one.tensors):
            continue
        other = _other_module(one) if one.what == "module" else _other_optimizer(one)
        if other is not None:
            thing: Any = other.ref()
            held = {id(p) for o in marks.optimizers() for g in o.param_groups for p in g["params"]}
            S.recorder.event(
                "restored_lost", one.site, what=one.what, kind=one.kind, num=one.num, source=one.source,
                rebuilt=sites.as_json(_apart(one.stack, other.stack)),
                trained=one.what == "optimizer" or any(id(p) in held for p in thing.parameters()),
            )  # fmt: skip


def _alike(one: Restored) -> list[Any]:
    return [m for m in names.root_modules() for m in m.modules() if type(m).__name__ == one.kind and lineage.shapes(m) == one.shapes]


def _other_module(one: Restored) -> Made | None:
    """Of the same kind and sizes and without a load, made by the same statement or in training; None where the values are anywhere."""
    alike = _alike(one)
    if any(_digest(m) == one.digest for m in alike):
        return None
    held = {id(p) for o in marks.optimizers() for g in o.param_groups for p in g["params"]}
    for made in _made:
        thing = made.ref()
        if thing is None or made.loaded or not any(thing is m for m in alike):
            continue
        same = one.made_at is not None and lineage.made_at(thing) == one.made_at
        if same or all(id(p) in held for p in thing.parameters()):
            return made
    return None


def _digest(module: Any) -> int:
    """On a device this waits, at a load and once after it."""
    return digests.of_tensors(list(module.parameters()))[0]


def _other_optimizer(one: Restored) -> Made | None:
    """Of the same kind, for as many parameters, and without a load."""
    for made in _made:
        thing: Any = made.ref()
        if made.loaded or type(thing).__name__ != one.kind or not any(thing is o for o in marks.optimizers()):
            continue
        if sum(len(g["params"]) for g in thing.param_groups) == one.num:
            return made
    return None


def _apart(load: list[sites.Site], made: list[sites.Site]) -> sites.Site:
    """The statement, of the innermost function that both ran in, that made the other one."""
    around = {_function(s) for s in load}
    return next((s for s in made if _function(s) in around), made[0] if made else sites.UNKNOWN)


def _function(site: sites.Site) -> tuple[str, str, int]:
    """Two classes have an `__init__` each."""
    tree = syntax.tree(site[0])
    return (site[0], site[2], getattr(syntax.function_at(tree, site[1]), "lineno", 0) if tree is not None else 0)


def _end() -> None:
    _watched.clear()
    _inside.clear()
    _made.clear()
    _counts["calls"] = 0
    if _hook:
        _hook.pop().remove()


def arm() -> None:
    import torch

    before(torch, "compile", lambda *args, **kwargs: _end())  # dynamo would trace the hook, and compile once more when it goes
    before(torch.nn.Module, "compile", lambda *args, **kwargs: _end())
    states.at_loaded.append(_after_load)
    wrap(torch.nn.Module, "named_parameters", _reading)
    wrap(torch.nn.Module, "state_dict", _reading)
    after(torch.nn.Module, "__init__", _after_made)
    after(torch.nn.Module, "__setstate__", _after_made)
    after(torch.optim.Optimizer, "__init__", _after_made)
    after(torch.optim.Optimizer, "load_state_dict", _after_optimizer_load)
    after(torch.optim.Optimizer, "state_dict", _after_optimizer_read)
    steps.at_any_step.append(_at_step, when=_watched)
