"""Processes that the script makes itself, and memory it shares with them (hogwild).

Event "process_start" (in the parent): method, target, args (modules among them: class, shared, num, digest, grads_shared, optimizer), threads,
site. Event "process_join" (in the parent): digest of the same modules once the child has been joined; changed.
Event "child_models" (in the child, at its first step): shared, opt, state_shared, grads_shared.
Event "share_memory": module or tensor, site.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from .. import closures, digests, sites
from ..arm import on_import
from ..patching import after, before, quiet
from ..state import S


_started: dict[int, tuple[sites.Site, list[tuple[Any, int]]]] = {}


def _modules(process: Any) -> list[Any]:
    """nn.Modules that a Process is given: among its arguments, their attributes, and in the target's closure and globals it names."""
    import torch

    args = [*getattr(process, "_args", ()), *dict(getattr(process, "_kwargs", {})).values()]
    target = getattr(process, "_target", None)
    args.extend(closures.values(target))
    if type(process)._target if hasattr(type(process), "_target") else False:
        args.append(process)
    found: list[Any] = []
    for item in [*args, process]:
        candidates = [item, *(vars(item).values() if hasattr(item, "__dict__") and not isinstance(item, torch.nn.Module) else ())]
        if isinstance(item, (list, tuple)):
            candidates.extend(item)
        if isinstance(item, dict):
            candidates.extend(item.values())
        for candidate in candidates:
            if isinstance(candidate, torch.nn.Module) and all(candidate is not m for m in found):
                found.append(candidate)
    return found[:8]


def _params(module: Any) -> list[Any]:
    return list(module.parameters())


def _before_start(process: Any) -> None:
    target = getattr(process, "_target", None)
    if "utils.data" in (getattr(target, "__module__", "") or "") or S.recorder.disabled:
        return
    import torch

    modules = _modules(process)
    site = sites.here(4)
    told = []
    for module in modules:
        params = _params(module)
        told.append({
            "module": type(module).__name__, "num": len(params), "shared": sum(p.is_shared() for p in params if p.device.type == "cpu"),
            "grads": sum(p.grad is not None for p in params), "grads_shared": sum(p.grad is not None and p.grad.is_shared() for p in params),
            "requires_grad": sum(p.requires_grad for p in params),
        })  # fmt: skip
    _started[id(process)] = (site, [(weakref.ref(m), digests.of_tensors(_params(m))[0]) for m in modules])
    inner = getattr(target, "__name__", "")
    if inner == "_wrap" and getattr(process, "_args", ()):
        inner = getattr(process._args[0], "__name__", inner)
    S.recorder.event(
        "process_start", site, method=_method(process), target=inner, models=told, threads=torch.get_num_threads(), os_threads=_os_threads(),
        key=id(process),
    )  # fmt: skip


def _method(process: Any) -> str:
    """fork, spawn or forkserver: what the process's class says, else the default."""
    import multiprocessing

    return str(getattr(process, "_start_method", None) or multiprocessing.get_start_method(allow_none=True) or "fork")


def _os_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _after_join(result: Any, process: Any, *args: Any, **kwargs: Any) -> None:
    if id(process) not in _started or process.exitcode is None:
        return
    site, modules = _started.pop(id(process))
    changed = []
    for ref, digest in modules:
        module = ref()
        if module is not None:
            changed.append({"module": type(module).__name__, "changed": digests.of_tensors(_params(module))[0] != digest})
    S.recorder.event("process_join", site, models=changed, exitcode=process.exitcode, key=id(process), child=process.pid)


def _after_share(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    S.recorder.event("share_memory", sites.here(4), kind=type(self).__name__)


_told: set[int] = set()


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    """In a process of the script's own: what of the model, its gradients and the optimizer's state is shared."""
    if S.recorder.role != "child" or S.group is not None or witness.opt in _told or S.steps < 1:
        return
    _told.add(witness.opt)
    living = [p for p in params if p is not None and p.device.type == "cpu"]
    state = [v for p in living for v in optimizer.state.get(p, {}).values() if hasattr(v, "is_shared") and v.dim()]
    S.recorder.event(
        "child_models", S.loss_site, opt=witness.opt, kind=type(optimizer).__name__, num=len(living), shared=sum(p.is_shared() for p in living),
        grads_shared=sum(p.grad is not None and p.grad.is_shared() for p in living), state=len(state), state_shared=sum(v.is_shared() for v in state),
    )  # fmt: skip


def arm() -> None:
    import torch

    from . import steps

    on_import("multiprocessing.process", lambda module: (before(module.BaseProcess, "start", _before_start), after(module.BaseProcess, "join", _after_join)))  # type: ignore[arg-type, return-value]
    after(torch.nn.Module, "share_memory", _after_share)
    after(torch.Tensor, "share_memory_", _after_share)
    steps.at_step.append(_at_step)


_ = quiet
