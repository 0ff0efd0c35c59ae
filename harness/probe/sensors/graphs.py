"""How many autograd graphs are still alive. A loss kept without `.detach()` keeps its graph: memory climbs a step at a time.

A token is put into the metadata dict of the root node, which lives exactly as long as the node. Nothing of the user's is kept alive.
Event "graphs": alive, mode ("train" | "eval"), site; written when the number alive reaches 8, 16, 32, ...
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import digests, sites
from ..state import S


class _Token:
    __slots__ = ("__weakref__",)


_alive: dict[str, int] = {"train": 0, "eval": 0}
_told: dict[str, int] = {"train": 4, "eval": 4}
_KEY = "_harness_token"


def _gone(mode: str) -> None:
    _alive[mode] -= 1
    S.graphs_alive = _alive["train"] + _alive["eval"]


def _roots(output: Any) -> list[Any]:
    import torch

    if isinstance(output, torch.Tensor):
        return [output]
    return digests.of_batch(output)[:2]


def watch(output: Any, mode: str) -> None:
    """Count the graph behind `output` as alive until its root node is freed."""
    for tensor in _roots(output)[:1]:
        node = tensor.grad_fn
        if node is None or _KEY in node.metadata:
            continue
        token = _Token()
        node.metadata[_KEY] = token
        weakref.finalize(token, _gone, mode).atexit = False
        _alive[mode] += 1
        S.graphs_alive = _alive["train"] + _alive["eval"]
        if _alive[mode] >= 2 * _told[mode]:
            _told[mode] = _alive[mode]
            S.recorder.event("graphs", sites.here(4), alive=_alive[mode], mode=mode)


def arm() -> None:
    """Nothing to patch: backward and DDP's forward call `watch`."""
