"""Processes that the script makes itself, and memory it shares with them (hogwild).

Event "process_start" (in the parent, once the child runs): site, key, child (pid), method, target, models [{module, id, num, shapes,
before, shared_before, shared, requires_grad, grads, grads_shared, serial (the same for one module at every start, unlike an id), outside (a
shared model that this child does not get: where the equal copy that it gets was made)}], threads, os_threads, shm_free, shm_total, loop
(header of the loop around the call). `before`: is_shared() counts before start(): spawn and forkserver share what they pass on the way.
Event "process_join" (in the parent, once it is known that the child has ended, or at the parent's own end): key, child, exitcode, models
[{id, changed}], left, at (site of the call that waited). Event "child_models" (in the child, at its second step): num, shared, grads_shared,
state, state_shared, opt, kind, counters (names of step counts in the state that are this process's own), counted_at (where one is set).
Each model also says where it was made (`made`, a site), and process_start which statement set the number of threads (`threads_at`).
Event "threads" (the script calls torch.set_num_threads; once a number): site, num, from_cores (its source asks for the number of cores).
Event "module_copied" (in a child, once a line): site, module. Event "optimizer_made" (in a child, once a line): site, kind.
Event "joining" (in the parent, before it waits; the first 64): site, child.
Event "model_used" (in the parent, the first use of such a model after a join: "forward" | "parameters" | "state_dict"): site, id, how,
changed. Event "models_left" (in the parent, at its end): models [{id, changed}]. Event "share_memory": kind, id, site, shm_free,
shm_total.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from .. import closures, cuts, lineage, origins, sites, sources
from ..arm import at_close, on_import
from ..patching import after, quiet, wrap
from ..state import S

MAX_MODULES = 16


class Started:
    """What the parent remembers of a child: digests of the models that it was given."""

    def __init__(self, site: sites.Site, modules: list[Any]) -> None:
        self.site, self.pid = site, os.getpid()  # a forked child inherits the table, not the children
        self.models = [(weakref.ref(m), lineage.digest_of(m)) for m in modules]


_started: dict[int, tuple[weakref.ref[Any], Started]] = {}


_threads_at: list[sites.Site] = []
_threads_told: set[int] = set()


def _note_made(result: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    lineage.note_made(module)


def _note_copied(result: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    _in_child("module_copied", module=type(module).__name__)
    lineage.note_copied(module)


def _note_threads(result: Any, num: Any = None, *args: Any, **kwargs: Any) -> None:
    _threads_at[:] = [sites.here(4)]
    num = kwargs.get("int", num)
    if isinstance(num, int) and _threads_at[0][0] and num not in _threads_told:
        _threads_told.add(num)
        S.recorder.event("threads", _threads_at[0], num=num, from_cores=num > 1 and cuts.any_text("cpu_count("))


def _modules(process: Any) -> list[Any]:
    """nn.Modules in reach of a Process: its arguments, its own attributes, what its target closes over or names."""
    import torch

    roots = [
        getattr(process, "_args", ()),
        getattr(process, "_kwargs", {}),
        getattr(process, "_target", None),
        dict(vars(process)),
        type(process).run,
    ]
    found: list[Any] = []
    for thing in closures.reach(roots, torch.nn.Module):
        if isinstance(thing, torch.nn.Module) and len(found) < MAX_MODULES and any(True for _ in thing.parameters()):
            found.append(thing)
    inner = {id(child) for m in found for child in m.modules() if child is not m}
    return [m for m in found if id(m) not in inner]


def _told(module: Any) -> dict[str, Any]:
    params = list(module.parameters())
    cpu = [p for p in params if p.device.type == "cpu"]
    return {
        "module": type(module).__name__, "made": lineage.made_at(module), "id": id(module), "num": len(params),
        "serial": lineage.serial(module), "shapes": lineage.shapes(module)[:400],
        "requires_grad": sum(p.requires_grad for p in params), "shared": sum(p.is_shared() for p in cpu),
        "grads": sum(p.grad is not None for p in cpu), "grads_shared": sum(p.grad is not None and p.grad.is_shared() for p in cpu),
    }  # fmt: skip


def _is_loader(process: Any) -> bool:
    """Processes that torch's loaders and multiprocessing's managers start for themselves."""
    module = getattr(getattr(process, "_target", None), "__module__", "") or ""
    return "utils.data" in module or module in ("multiprocessing.managers", "torch.multiprocessing.pool")


def _start(original: Any) -> Any:
    look, told = quiet(_before_start), quiet(_after_start)

    def start(self: Any, *args: Any, **kwargs: Any) -> Any:
        if S.recorder.disabled or _is_loader(self):
            return original(self, *args, **kwargs)
        site, name = sites.here(2), _target_name(self)
        modules, before, outside = look(self, site) or ([], [], {})
        result = original(self, *args, **kwargs)
        told(self, name, modules, before, outside, site)
        return result

    return start


def _target_name(process: Any) -> str:
    """Name of the function that the child runs; start() deletes it from the process."""
    target = getattr(process, "_target", None)
    name = getattr(target, "__name__", type(process).__name__)
    if name == "_wrap" and getattr(process, "_args", ()):  # torch.multiprocessing.spawn
        return str(getattr(process._args[0], "__name__", name))
    return str(name)


def _before_start(process: Any, site: sites.Site) -> tuple[list[Any], list[int], dict[int, Any]]:
    given = _modules(process)
    originals = lineage.originals(given)
    modules = [*given, *(model for model, _ in originals)]
    started = Started(site, modules)
    for module, (ref, digest) in zip(modules, started.models, strict=True):
        if id(module) not in _before or _before[id(module)][0]() is not module:
            _before[id(module)] = (ref, digest)
    _started[id(process)] = (weakref.ref(process), started)
    for look in at_starting:
        look(site)
    for look in at_giving:
        look(site, modules)
    outside = {id(model): lineage.made_at(copy) for model, copy in originals}
    return modules, [sum(p.is_shared() for p in m.parameters() if p.device.type == "cpu") for m in modules], outside


def _after_start(process: Any, name: str, modules: list[Any], before: list[int], outside: dict[int, Any], site: sites.Site) -> None:
    import torch

    models = [
        _told(m) | {"shared_before": b} | ({"outside": outside[id(m)]} if id(m) in outside else {}) for m, b in zip(modules, before, strict=True)
    ]
    S.recorder.event(
        "process_start", site, key=id(process), child=process.pid, method=_method(process), target=name, models=models,
        threads=torch.get_num_threads(), threads_at=sites.as_json(_threads_at[0]) if _threads_at else None,
        os_threads=_os_threads(), loop=origins.loop_header(site), **_shm(),
    )  # fmt: skip
    for look in at_started:
        look(site, modules)


def _method(process: Any) -> str:
    """fork, spawn or forkserver: what the process's class says, else the default."""
    import multiprocessing

    return str(getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True) or "fork")


def _os_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _shm() -> dict[str, int]:
    """Room in /dev/shm, where torch keeps what processes share."""
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return {}
    return {"shm_free": room.f_bavail * room.f_frsize, "shm_total": room.f_blocks * room.f_frsize}


MAX_JOINS = 64
_num_joins = [0]


def _join(original: Any) -> Any:
    note = quiet(_ended)

    def join(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) not in _started:
            return original(self, *args, **kwargs)
        site = sites.here(2)
        if _num_joins[0] < MAX_JOINS:
            _num_joins[0] += 1
            S.recorder.event("joining", site, child=self.pid)
        S.recorder.enter("join", site)
        try:
            result = original(self, *args, **kwargs)
        finally:
            S.recorder.leave()
        note(self, site)
        return result

    return join


def _ended(process: Any, site: sites.Site) -> None:
    ref, started = _started[id(process)]
    code = getattr(getattr(process, "_popen", None), "returncode", None)
    if id(ref()) != id(process) or code is None:
        return
    del _started[id(process)]
    S.recorder.event(
        "process_join", started.site, key=id(process), child=process.pid, exitcode=code, models=_changes(started), left=False,
        at=sites.as_json(site),
    )  # fmt: skip
    if not any(s.pid == os.getpid() for _, s in _started.values()):
        for told in at_all_joined:
            told()
    _watch(started)


at_shared: list[Any] = []  # sensors that are told of share_memory(): (module or tensor, site)
at_starting: list[Any] = []  # those that look right before a child is made, which inherits what they keep: (site)
at_giving: list[Any] = []  # those that look at the models that it gets before it is made: (site, modules)
at_started: list[Any] = []  # sensors that look at the models of a child that has been started: (site, modules)
at_all_joined: list[Any] = []  # and those that are told when the last child has been waited for


def _changes(started: Started) -> list[dict[str, Any]]:
    living = [(module, digest) for ref, digest in started.models if (module := ref()) is not None]
    return [{"id": id(module), "module": type(module).__name__, "changed": lineage.digest_of(module) != digest} for module, digest in living]


_watched: dict[int, tuple[weakref.ref[Any], int]] = {}  # models that joined children had in reach -> digest before the first of them
_before: dict[int, tuple[weakref.ref[Any], int]] = {}  # the same, from the start on
_hook: list[Any] = []


def _watch(started: Started) -> None:
    """From a join on, until the parent uses the model: what it finds in it decides whether anything was lost."""
    import torch

    for ref, _ in started.models:
        module = ref()
        if module is not None and id(module) in _before:
            _watched[id(module)] = _before[id(module)]
    if _watched and not _hook and not S.compiling:
        look = quiet(_used)

        def hook(module: Any, args: Any) -> None:
            if id(module) in _watched:
                look(module, "forward")

        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(hook))


def _used(module: Any, how: str) -> None:
    ref, digest = _watched.pop(id(module), (None, 0))
    if ref is not None and ref() is module:
        S.recorder.event("model_used", sites.here(4), id=id(module), how=how, changed=lineage.digest_of(module) != digest)
    if not _watched and _hook:
        _hook.pop().remove()


def _reading(how: str) -> Any:
    look = quiet(_used)

    def make(original: Any) -> Any:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _watched and id(self) in _watched:
                look(self, how)
            return original(self, *args, **kwargs)

        return read

    return make


def finish() -> None:
    """Children that nobody joined, whose exit status is the script's to collect; and what has become of the models in the end."""
    living = [(module, digest) for ref, digest in _before.values() if (module := ref()) is not None and S.recorder.role == "main"]
    if living:
        S.recorder.event("models_left", models=[{"id": id(m), "changed": lineage.digest_of(m) != digest} for m, digest in living])
    for ref, started in [entry for entry in _started.values() if entry[1].pid == os.getpid()]:
        process = ref()
        S.recorder.event(
            "process_join",
            started.site,
            key=id(process),
            child=getattr(process, "pid", None),
            exitcode=None,
            models=_changes(started),
            left=True,
        )
    _started.clear()


def _share(original: Any) -> Any:
    def tell(thing: Any, site: sites.Site) -> None:
        S.recorder.event("share_memory", site, kind=type(thing).__name__, id=id(thing), **_shm())
        lineage.note_shared(thing)
        for look in at_shared:
            look(thing, site)

    note = quiet(tell)

    def share(self: Any, *args: Any, **kwargs: Any) -> Any:
        _depth[0] += 1  # a module shares tensor by tensor: told once
        try:
            result = original(self, *args, **kwargs)
        finally:
            _depth[0] -= 1
        if not _depth[0]:
            note(self, sites.here(2))
        return result

    return share


_depth = [0]
_told_opts: set[int] = set()


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    """In a process of the script's own: what of the model, its gradients and the optimizer's state is shared."""
    if S.recorder.role != "child" or S.group is not None or witness.opt in _told_opts or S.steps < 1:
        return
    _told_opts.add(witness.opt)
    living = [p for p in params if p is not None and p.device.type == "cpu"]
    state = [v for p in living for v in optimizer.state.get(p, {}).values() if hasattr(v, "is_shared") and v.dim()]
    S.recorder.event(
        "child_models", S.loss_site, opt=witness.opt, kind=type(optimizer).__name__, num=len(living),
        shared=sum(p.is_shared() for p in living),
        grads_shared=sum(p.grad is not None and p.grad.is_shared() for p in living), state=len(state),
        state_shared=sum(v.is_shared() for v in state), **_counters(optimizer, living),
    )  # fmt: skip


def _counters(optimizer: Any, params: list[Any]) -> dict[str, Any]:
    """Step counts that are no shared tensors: Python's numbers, tensors of this process."""
    names = {str(k) for p in params for k, v in optimizer.state.get(p, {}).items() if ("step" in str(k) or k == "t") and not _shared_number(v)}
    at = next((s for name in names for file in cuts.user_files() if (s := sources.item_set_at(file, name)) is not None), None) if names else None
    return {"counters": sorted(names)[:4], "counted_at": sites.as_json(at) if at is not None else None}


def _shared_number(value: Any) -> bool:
    return bool(value.is_shared()) if hasattr(value, "is_shared") and value.device.type == "cpu" else not isinstance(value, (int, float))


def _in_child(event: str, /, **fields: Any) -> None:
    """Where a worker makes what it trains with: a copy of the model, an optimizer."""
    site = sites.here(4)
    if S.recorder.role == "child" and S.group is None and site[0] and len(_told_at) < 40 and (event, *site[:2]) not in _told_at:
        _told_at.add((event, *site[:2]))
        S.recorder.event(event, site, **fields)


_told_at: set[tuple[str, str, int]] = set()


def _processes(module: Any) -> None:
    wrap(module.BaseProcess, "start", _start)
    wrap(module.BaseProcess, "join", _join)


def arm() -> None:
    import torch

    from . import steps

    on_import("multiprocessing.process", _processes)
    wrap(torch.nn.Module, "share_memory", _share)
    wrap(torch.Tensor, "share_memory_", _share)
    after(torch.nn.Module, "__init__", _note_made)
    after(torch, "set_num_threads", _note_threads)
    after(torch.nn.Module, "__setstate__", _note_copied)
    after(torch.optim.Optimizer, "__init__", lambda result, self, *a, **k: _in_child("optimizer_made", kind=type(self).__name__))
    wrap(torch.nn.Module, "named_parameters", _reading("parameters"))
    wrap(torch.nn.Module, "state_dict", _reading("state_dict"))
    steps.at_step.append(_at_step)
    at_close.append(quiet(finish))
