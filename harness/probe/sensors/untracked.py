"""Batch normalisation with weights that were trained and statistics that never were: an average of the weights that leaves the buffers out.

Event "untracked": module, num (layers); site: the evaluation. A layer counts where its running mean is 0, its variance 1, no batch was ever tracked,
and its weight is no constant: a fresh layer's is, whatever it was filled with. What is trained itself (in eval mode on purpose) is left out.
"""

from __future__ import annotations

from typing import Any

from .. import sites
from ..state import S
from . import layers, modes

_calls: dict[int, int] = {}  # evaluation forwards by id of the module: the 1st, 2nd, 4th, 8th ... are looked at
MAX_MODULES = 64
_told: set[int] = set()


def _at_eval_forward(root: Any) -> None:
    calls = _calls.get(id(root), 0) + 1
    if id(root) in _told or (calls == 1 and len(_calls) >= MAX_MODULES):
        return
    _calls[id(root)] = calls
    if calls & (calls - 1):
        return
    norms = [m for m in root.modules() if _untracked(m)]
    if norms and not _trained(norms):
        _told.add(id(root))
        S.recorder.event("untracked", sites.here(3), module=type(root).__name__, num=len(norms))


def _untracked(layer: Any) -> bool:
    """On a device this waits once or twice, in a call of a power of two."""
    import torch

    if not isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
        return False
    module: Any = layer
    if module.training or module.weight is None or module.running_mean is None:
        return False
    if module.num_batches_tracked is None or module.weight.numel() < 2 or int(module.num_batches_tracked):
        return False
    return not module.running_mean.any() and bool((module.running_var == 1).all()) and bool((module.weight != module.weight[0]).any())


def _trained(norms: list[Any]) -> bool:
    kept = {id(m) for root in layers.roots() for m in root.modules()}
    return any(id(m) in kept or m.weight.grad is not None for m in norms)


def arm() -> None:
    modes.at_eval_forward.append(_at_eval_forward)
