"""Batch normalisation with weights that follow training and statistics that do not: an average of the weights that leaves the buffers out.

Event "untracked": module, num (layers); site: the evaluation. A layer counts where its running mean is 0, its variance 1, no batch was ever tracked,
and its weight is no constant: a fresh layer's is, whatever it was filled with. The weights follow training where they have moved since the model
was evaluated, or trained on beside, before, or are those of a trained model: a network that is drawn at random and left so, and one out of a file
whose statistics are folded into its weights, keep what they have. What is trained itself (in eval mode on purpose) is left out.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import digests, sites
from ..state import S
from . import averaged, layers, modes

MAX_MODULES = 64
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # evaluation forwards: the 1st, 2nd, 4th, 8th ... are looked at
_weights: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # digest of such layers' weights at the first look
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def _at_eval_forward(root: Any) -> None:
    calls = _calls.get(root, 0) + 1
    if root in _told or (calls == 1 and len(_calls) >= MAX_MODULES):
        return
    _calls[root] = calls
    if calls & (calls - 1):
        return
    norms = [m for m in root.modules() if _untracked(m)]
    if norms and not _trained(norms) and _follow(root, norms):
        _told.add(root)
        S.recorder.event("untracked", sites.here(3), module=type(root).__name__, num=len(norms))


def _follow(root: Any, norms: list[Any]) -> bool:
    """Whether their weights come from training in this run."""
    import torch

    now = digests.of_tensors([m.weight for m in norms])[0]
    if now != _weights.setdefault(root, now) or averaged.has_moved(root):
        return S.steps > 0
    others = [m.weight for r in layers.roots() for m in r.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm) and m.weight is not None]
    alike = [w for w in others if w.shape == norms[0].weight.shape and w.device == norms[0].weight.device and w.dtype == norms[0].weight.dtype]
    return S.steps > 0 and any(torch.equal(w, norms[0].weight) for w in alike[:MAX_MODULES])


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
