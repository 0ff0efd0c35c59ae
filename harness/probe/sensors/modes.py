"""train() and eval() of whole models, torch.compile, torch.export, DataParallel.

Event "mode" (first 400): training, module, root (it is nobody's child among wrapped modules), site, against (a train() of the script's own
was told to go to eval mode, and puts itself into train mode).
Event "data_parallel": device_ids, site. Event "compile": site; not of an export, which the probe
makes way for as well.
Event "eval_graphs": see graphs.py; forwards of a module in eval mode with gradients enabled.
"""

from __future__ import annotations

import sys
from typing import Any

from .. import copies, modulehooks, names, sites, trainflags
from ..arm import on_import
from ..patching import after, before, quiet, wrap
from ..state import S
from . import ddp, feeders, forwards, graphs, reached, rng

EXPORTS = ("export", "export_for_training", "export_for_inference", "draft_export")
_depth = [0]
_compiled = [False]
_hook: list[Any] = []
_eval_roots: set[int] = set()
at_eval_forward: list[Any] = []  # sensors that look at a module in eval mode that was just called
at_switch: list[Any] = []  # sensors that are told (module, mode, site) of each train() or eval() that the script calls


def _before_train(module: Any, mode: Any = True, *args: Any, **kwargs: Any) -> None:
    trainflags.num_switches[0] += 1
    frame_site = sites.here(4)
    if frame_site[0] and sites.switched_by_user(sys._getframe(2)):
        S.recorder.event(
            "mode", frame_site, training=bool(mode), module=type(module).__name__, against=bool(mode) and _against_its_mode(module)
        )
        for look in at_switch:
            look(module, bool(mode), frame_site)
        _watch_eval(module, bool(mode))


def _against_its_mode(module: Any) -> bool:
    """Whether an override of train() that was given False passes True on for the whole module; looked at where the user's code switches."""
    frame: Any = sys._getframe(4)
    for _ in range(6):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name == "train" and code.co_argcount > 1 and sites.is_user_code(code):
            told = [frame.f_locals.get(name) for name in code.co_varnames[:2]]
            return told[0] is module and told[1] is False
        frame = frame.f_back
    return False


def _watch_eval(module: Any, mode: bool) -> None:
    """While a model is in eval mode, look at the outputs of its outermost forward: with gradients on, each keeps a graph."""
    if mode:
        graphs.training_again()
    if S.compiling:
        return
    import torch

    inner = vars(module).get("_modules", {}).get("module")  # what DDP or DataParallel wraps may be called itself
    for one in (module, inner):
        if mode:
            _eval_roots.discard(id(one))
        elif one is not None:
            _eval_roots.add(id(one))
    if _eval_roots and not _hook:
        look = quiet(_after_eval_forward)

        def hook(m: Any, args: Any, output: Any) -> None:
            if id(m) in _eval_roots:
                look(m, output)

        _hook.append(torch.nn.modules.module.register_module_forward_hook(hook))
    elif not _eval_roots and _hook:
        _hook.pop().remove()


def _after_eval_forward(module: Any, output: Any) -> None:
    import torch

    ddp.note_inner_eval(module)
    for look in at_eval_forward:
        look(module)
    if torch.is_grad_enabled():
        graphs.watch(output, "eval")


def _before_compile(*args: Any, **kwargs: Any) -> None:
    if not _compiled[0]:
        _compiled[0] = True
        S.recorder.event("compile", sites.here(4))
    _make_way()


def _make_way(*args: Any, **kwargs: Any) -> None:
    """For dynamo, which is about to read code."""
    if not S.compiling:
        S.compiling = True
        rng.disarm()
        forwards.stop()
        feeders.stop()
        copies.stop()
        modulehooks.remove_all()
        _hook.clear()


def _arm_dynamo(dynamo: Any) -> None:
    before(dynamo, "export", _make_way)
    before(dynamo, "optimize", _before_compile)


def _after_data_parallel(result: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    S.recorder.event(
        "data_parallel", sites.here(4), device_ids=[str(d) for d in getattr(self, "device_ids", [])], module=type(module).__name__
    )


def _note_modules(module: Any) -> None:
    for method in ("__init__", "__setstate__"):
        wrap(module, method, _noting)


def _noting(original: Any) -> Any:
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            names.note_module(self)
            reached.note_module()
        except TypeError:
            S.recorder.errors += 1
        return result

    return made


def arm() -> None:
    import torch

    _note_modules(torch.nn.Module)
    before(torch.nn.Module, "train", _before_train)
    before(torch, "compile", _before_compile)
    before(torch.nn.Module, "compile", _before_compile)
    for name in EXPORTS:
        before(getattr(torch, "export", None), name, _make_way)
    on_import("torch._dynamo", _arm_dynamo)
    after(torch.nn.DataParallel, "__init__", _after_data_parallel)
