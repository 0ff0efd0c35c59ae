"""Modules without parameters whose output goes into a model that is trained: normalisers, codebooks. Nobody synchronises their buffers.

Event "feeder" (at steps 8, 16, 32, ..., one a module; first 8 modules): module, made (the statement that made it), buffers (names), early, late
(digests of its buffers in the first steps and now). Global forward hooks are there for the first three steps only, and not where
torch.compile is used.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from .. import digests, lineage, modulehooks, names
from ..patching import quiet
from ..state import S
from . import steps

LAST_STEP, MAX = 3, 8
_hooks: list[Any] = []
_gave: dict[int, tuple[weakref.ref[Any], Any]] = {}  # id of an output -> (it, the module that made it)
_feeders: dict[int, Feeder] = {}


@dataclass
class Feeder:
    module: weakref.ref[Any]
    early: int


def stop() -> None:
    modulehooks.remove(_hooks)
    _gave.clear()


def _after(module: Any, args: Any, output: Any) -> None:
    if S.steps >= LAST_STEP or S.compiling:
        stop()
    elif not S.busy and not S.recorder.disabled and module.training:
        _note_output(module, output)


@quiet
def _note_output(module: Any, output: Any) -> None:
    import torch

    if isinstance(output, torch.Tensor) and _buffers(module) and next(module.parameters(), None) is None:
        if len(_gave) > 64:
            _gave.clear()
        _gave[id(output)] = (weakref.ref(output), weakref.ref(module))


def _before(module: Any, args: Any) -> None:
    if _gave and not S.busy and not S.recorder.disabled:
        _note_input(module, args)


@quiet
def _note_input(module: Any, args: Any) -> None:
    for arg in args:
        gave = _gave.get(id(arg))
        feeder = gave[1]() if gave is not None and gave[0]() is arg else None
        if feeder is None or id(feeder) in _feeders or len(_feeders) >= MAX or next(module.parameters(), None) is None:
            continue
        if any(root is feeder for root in names.root_modules()):  # a part of a wrapped model is DDP's to broadcast
            _feeders[id(feeder)] = Feeder(weakref.ref(feeder), digests.of_tensors(_buffers(feeder))[0])


def _buffers(module: Any) -> list[Any]:
    return [b for b in module.buffers() if b.is_floating_point() and digests.plain(b) and b.device.type == "cpu"]


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if not _feeders or S.steps < 8 or S.steps & (S.steps - 1):
        return
    for one in _feeders.values():
        module = one.module()
        if module is not None:
            S.recorder.event(
                "feeder", module=type(module).__name__, made=lineage.made_at(module), buffers=[n for n, _ in module.named_buffers()][:8],
                early=one.early, late=digests.of_tensors(_buffers(module))[0],
            )  # fmt: skip


def arm() -> None:
    from torch.nn.modules import module

    _hooks.extend((module.register_module_forward_hook(_after), module.register_module_forward_pre_hook(_before)))
    steps.at_step.append(_at_step, when=_feeders)
