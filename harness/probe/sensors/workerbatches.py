"""What a worker process of the script's own (hogwild) feeds the model that it trains, forward by forward, where no DataLoader tells it.

Event "worker_fed" (once, after 32 training forwards or at the end): digests (packed, one a forward), seeded (the statement in the function of
the loss that seeds a generator, where the source shows one). From the second batch on: the first backward shows that the process trains.
The outermost module that is called with gradients is the model; inputs on the CPU only.
"""

from __future__ import annotations

import ast
import weakref
from typing import Any

from .. import digests, modulehooks, sites, syntax
from ..arm import at_close
from ..datasets import pack
from ..patching import quiet
from ..state import S
from . import backward

NUM = 32
SEEDS = ("manual_seed", "seed", "default_rng", "RandomState")
_hook: list[Any] = []
_fed: list[int] = []
_root: list[weakref.ref[Any]] = []
_state = {"looking": False, "told": False}


def _at_backward(loss: Any) -> None:
    import torch

    if _state["looking"] or S.recorder.role != "child" or S.group is not None or S.compiling:
        return
    _state["looking"] = True
    look = quiet(_look)

    def hook(module: Any, args: Any) -> None:
        if (not _root or _root[0]() is module) and torch.is_grad_enabled():
            look(module, args)

    _hook.append(torch.nn.modules.module.register_module_forward_pre_hook(hook))


def _look(module: Any, args: Any) -> None:
    if S.in_backward or S.compiling:  # checkpointing calls parts of the model again
        return
    if not _root:
        _root.append(weakref.ref(module))
    tensors = digests.of_batch(args)[:4]
    if tensors and all(t.device.type == "cpu" for t in tensors):
        _fed.append(digests.of_tensors(tensors)[0] >> 32 & 0xFFFFFFFF)
    if len(_fed) >= NUM:
        _tell()


def _tell() -> None:
    modulehooks.remove(_hook)
    if _fed and not _state["told"]:
        _state["told"] = True
        S.recorder.event("worker_fed", digests=pack(_fed), seeded=sites.as_json(seeded_at(S.loss_site or sites.UNKNOWN) or sites.UNKNOWN))


def seeded_at(site: sites.Site) -> sites.Site | None:
    """The last statement above a line of the same function that seeds a generator."""
    tree = syntax.tree(site[0]) if site[0] else None
    scope = syntax.function_at(tree, site[1]) if tree is not None else None
    calls = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.Call) and n.lineno < site[1]] if scope is not None else []
    lines = [n.lineno for n in calls if (n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")) in SEEDS]
    return (site[0], max(lines), site[2]) if lines else None


def arm() -> None:
    backward.at_backward.append(_at_backward)
    at_close.append(quiet(_tell))
