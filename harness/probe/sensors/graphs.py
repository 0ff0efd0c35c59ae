"""How many autograd graphs are still alive. A loss kept without `.detach()` keeps its graph: memory climbs a step at a time.

A token is put into the metadata dict of the root node, which lives exactly as long as the node. Nothing of the user's is kept alive.
Event "graphs": alive, mode ("train" | "eval"), site, keeper (site of the statement that keeps them, by
reading the source) or null; written when the number alive reaches 8, 16, 32, ...
Event "eval_graphs" (end of an evaluation whose forwards made graphs): forwards, peak (graphs alive at once), used (a later backward
reaches them), site, keeper.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import digests, keepers, sites
from ..arm import at_close
from ..patching import quiet
from ..state import S


class _Token:
    __slots__ = ("__weakref__", "mode")

    def __init__(self, mode: str) -> None:
        self.mode = mode


# graphs alive by what bears the token: the loss's root, the root of a model's output, the node nearest to the leaves (kept too where only
# an intermediate output is kept, by a forward hook), and outputs in eval mode
_alive: dict[str, int] = {"loss": 0, "output": 0, "depth": 0, "eval": 0}
_told: dict[str, int] = {"train": 4, "eval": 4}
_KEY = "_harness_token"
MAX_NODES = 5000
MAX_HOPS = 256
TRANSPOSES = ("TBackward0", "TransposeBackward0", "PermuteBackward0")  # a parameter stands behind them


class Evaluation:
    """Forwards in eval mode with gradients on, from the first one to the next train() and backward."""

    def __init__(self) -> None:
        self.before = max(0, _alive["eval"] - 1)
        self.backwards = S.backwards
        self.forwards = self.peak = 0
        self.look_at = 3  # graphs kept when we first ask who keeps them
        self.site = sites.UNKNOWN
        self.keeper: dict[str, Any] | None = None
        self.over = False  # train() was called


_evaluation: list[Evaluation] = []


def _keeper(site: sites.Site) -> dict[str, Any] | None:
    found = keepers.statement(site)
    return sites.as_json(found) if found is not None else None


def _gone(mode: str) -> None:
    _alive[mode] -= 1
    S.graphs_alive = max(_alive.values())


def _bear(node: Any, kind: str) -> bool:
    """Put a token into a node; False where it has one."""
    if _KEY in node.metadata:
        return False
    token = _Token(kind)
    node.metadata[_KEY] = token
    weakref.finalize(token, _gone, kind).atexit = False
    _alive[kind] += 1
    S.graphs_alive = max(_alive.values())
    return True


def _nearest_to_leaves(node: Any) -> Any:
    """Down the graph along its first branch; about 1 us a node, at most 256 nodes."""
    for _ in range(MAX_HOPS):
        below = [n for n, _ in node.next_functions if n is not None and n.next_functions]
        if not below:
            break
        node = next((n for n in below if type(n).__name__ not in TRANSPOSES), below[0])
    return node


def _roots(output: Any) -> list[Any]:
    import torch

    if isinstance(output, torch.Tensor):
        return [output]
    return digests.of_batch(output)[:2]


def watch(output: Any, mode: str) -> None:
    """Count the graph behind `output` as alive until its root node is freed."""
    if mode == "train" and _evaluation and S.backwards > _evaluation[0].backwards:
        _settle(output)
    for tensor in _roots(output)[:1]:
        node = tensor.grad_fn
        kind = "eval" if mode == "eval" else "loss" if tensor.numel() == 1 else "output"
        if node is None or not _bear(node, kind):
            continue
        if mode == "eval":
            _evaluated()
        elif kind == "loss":
            _bear(_nearest_to_leaves(node), "depth")
        _tell_growth(mode, _alive["eval"] if mode == "eval" else max(_alive["loss"], _alive["output"], _alive["depth"]))


def _tell_growth(mode: str, alive: int) -> None:
    if alive >= 2 * _told[mode]:
        _told[mode] = alive
        site = sites.here(5)
        S.recorder.event("graphs", site, alive=alive, mode=mode, keeper=_keeper(site))


def _evaluated() -> None:
    """One more forward of an evaluation has made a graph."""
    if not _evaluation or _evaluation[0].over:
        _evaluation[:] = [Evaluation()]
    now = _evaluation[0]
    now.forwards += 1
    kept = _alive["eval"] - now.before
    now.peak = max(now.peak, kept)
    now.site = sites.here(4)
    if kept >= now.look_at:
        now.look_at *= 4
        now.keeper = _keeper(now.site)


def training_again() -> None:
    """train() was called: the evaluation is over. Whether its graphs were meant for a backward is seen at the next one."""
    if _evaluation:
        _evaluation[0].over = True


def _settle(loss: Any) -> None:
    now = _evaluation.pop()
    if now.forwards > 2:
        _tell(now, used=_alive["eval"] > 0 and _reaches_evaluation(loss))


def _tell(now: Evaluation, used: bool) -> None:
    S.recorder.event("eval_graphs", now.site, forwards=now.forwards, peak=now.peak, used=used, keeper=now.keeper)


def _reaches_evaluation(loss: Any) -> bool:
    """Whether the graph of this loss holds a node that an evaluation made: then the graphs were kept on purpose."""
    todo: list[Any] = [getattr(loss, "grad_fn", None)]
    seen: set[Any] = set()
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        token = node.metadata.get(_KEY)
        if token is not None and token.mode == "eval":
            return True
        todo.extend(n for n, _ in node.next_functions)
    return False


def _finish() -> None:
    if _evaluation and _evaluation[0].forwards > 2:
        _tell(_evaluation.pop(), used=False)


def arm() -> None:
    """Backward and DDP's forward call `watch`; modes.py calls it for other modules in eval mode."""
    at_close.append(quiet(_finish))
