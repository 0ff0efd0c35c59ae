"""What the parent does with a shared model while its worker processes run.

Event "model_early" (once a statement and way, when the last child has been waited for, or at the parent's end): site (the frame of the
function that started the children, where there is one), id, how ("forward" | "parameters" | "state_dict"), num (how often), grad (gradients
were on), training (the model was in train mode), since (the model has changed since the first of them).
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

from .. import lineage, modulehooks, sites
from ..arm import at_close
from ..patching import quiet, wrap
from ..state import S
from . import shared

MAX_USES = 16


@dataclass
class Use:
    """One statement that uses a model while it is trained."""

    module: weakref.ref[Any]
    how: str
    grad: bool
    training: bool
    digest: int
    num: int = 0


_models: dict[int, tuple[weakref.ref[Any], sites.Site]] = {}  # models of running children -> where the child was started
_uses: dict[tuple[int, str, sites.Site], Use] = {}
_hook: list[Any] = []


def _started(site: sites.Site, modules: list[Any]) -> None:
    import torch

    for module in modules:
        if any(p.is_shared() for p in module.parameters() if p.device.type == "cpu"):
            _models[id(module)] = (weakref.ref(module), site)
    if _models and not _hook and not S.compiling and S.recorder.role == "main":
        _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(_forward))


def _forward(module: Any, args: Any) -> None:
    if id(module) in _models:
        _look(module, "forward")


@quiet
def _look(module: Any, how: str) -> None:
    import torch

    ref, started = _models[id(module)]
    if id(ref()) != id(module):
        return
    stack = sites.stack(3)
    site = next((s for s in stack if s[0] == started[0] and s[2] == started[2]), stack[0] if stack else sites.UNKNOWN)
    key = (id(module), how, site)
    if key not in _uses and len(_uses) < MAX_USES:
        _uses[key] = Use(ref, how, torch.is_grad_enabled(), module.training, lineage.digest_of(module))
    if key in _uses:
        _uses[key].num += 1


def _tell() -> None:
    for (id_, how, site), use in _uses.items():
        module = use.module()
        S.recorder.event(
            "model_early", site, id=id_, how=how, num=use.num, grad=use.grad, training=use.training,
            since=module is not None and lineage.digest_of(module) != use.digest,
        )  # fmt: skip
    _let_go()


def _let_go() -> None:
    _uses.clear()
    _models.clear()
    modulehooks.remove(_hook)


def _reading(how: str) -> Any:
    def make(original: Any) -> Any:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _models and id(self) in _models:
                _look(self, how)
            return original(self, *args, **kwargs)

        return read

    return make


def arm() -> None:
    import torch

    wrap(torch.nn.Module, "named_parameters", _reading("parameters"))
    wrap(torch.nn.Module, "state_dict", _reading("state_dict"))
    shared.at_started.append(_started)
    shared.at_all_joined.append(_tell)  # inside of a guarded look already
    os.register_at_fork(after_in_child=_let_go)
    at_close.append(quiet(_tell))
