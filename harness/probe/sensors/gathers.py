"""Tensors that are gathered from all ranks inside a training forward, and whether the loss compares with them as with constants.

`dist.all_gather` returns tensors without a gradient. In a contrastive loss nothing then flows into the embeddings that the others are compared
with, the rank's own among them. Looked at in the first steps only: a gather of a tensor that has a graph leaves two sums of what it returned
and of what it was given; before the backward the products of the loss's graph are asked for a factor without a gradient and with the same
sums. A gather that has a gradient, or whose own part was put back, makes a factor that has one.
What a hook would have to unpack (checkpointing) stays untouched.
Event "cut_gather": site, op, numel, product (name of the operation), own (a product holds the rank's own tensor with its gradient).
"""

from __future__ import annotations

from typing import Any

from .. import protocol, sites
from ..patching import contained, quiet
from ..state import S

OPS = {"all_gather", *protocol.GATHER_INTO}
FIRST_STEPS = 3
MAX_PENDING = 8
MAX_NODES = 300
PRODUCTS = {"MmBackward0", "BmmBackward0", "AddmmBackward0", "BaddbmmBackward0", "MulBackward0", "CdistBackward0", "EuclideanDistBackward0"}
FACTORS = ("self", "mat1", "mat2", "other", "batch1", "batch2", "x1", "x2")
_KEY = "_harness_gathered"


class Gather:
    """One call: what came back and what was given, by two sums each."""

    def __init__(self, op: str, site: sites.Site, own: Any, parts: list[Any]) -> None:
        self.op, self.site = op, site
        self.numel = sum(int(p.numel()) for p in parts)
        self.all = sums(parts)
        self.own_numel, self.own = int(own.numel()), sums([own])


_pending: list[Gather] = []


def sums(parts: list[Any]) -> tuple[float, float]:
    doubles = [p.detach().double() for p in parts]
    return float(sum(d.sum() for d in doubles)), float(sum(d.square().sum() for d in doubles))


def close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    scale = max(one[1], 1e-12)
    return abs(one[1] - other[1]) <= 1e-6 * scale and abs(one[0] - other[0]) <= 1e-5 * max(abs(one[0]), scale**0.5)


@quiet
def note(op: str, args: Any, kwargs: Any, result: Any, site: sites.Site) -> None:
    """After a gather of the first steps."""
    import torch

    from . import targets

    named = kwargs.get("tensor") if op == "all_gather" else kwargs.get("input_tensor")
    into = kwargs.get("tensor_list") if op == "all_gather" else kwargs.get("output_tensor")
    into, own = into if into is not None else args[0], named if named is not None else args[len(args) - 1 if into is not None and len(args) == 1 else 1]
    if result is not None:
        return
    targets.note(site, own, len(into) if isinstance(into, (list, tuple)) else int(into.numel() // max(1, own.numel())))
    if not own.requires_grad or own.grad_fn is None or len(_pending) >= MAX_PENDING:
        return
    parts = list(into) if isinstance(into, (list, tuple)) else [into]
    with torch.no_grad():
        _pending.append(Gather(op, site, own, parts))
    own.grad_fn.metadata[_KEY] = True


@contained
def _look(loss: Any) -> None:
    if not _pending:
        return
    found = list(_pending)
    _pending.clear()
    if getattr(loss, "grad_fn", None) is None:
        return
    products = _products(loss.grad_fn)
    for one in found:
        match = next((name for name, grad, size, sums in products if not grad and size == one.numel and close(one.all, sums)), None)
        own = any(grad and size == one.own_numel and close(one.own, sums) for name, grad, size, sums in products)
        if match is not None:
            S.recorder.event("cut_gather", one.site, op=one.op, numel=one.numel, product=match, own=own)


def _products(root: Any) -> list[tuple[str, bool, int, tuple[float, float]]]:
    """(operation, whether the factor has a gradient, its size, its sums) of the products between the loss and what was gathered."""
    import torch

    found = []
    todo, seen = [root], {root}
    with torch.no_grad():
        while todo and len(seen) < MAX_NODES:
            node = todo.pop(0)
            if type(node).__name__ in PRODUCTS:
                factors = [f for f in (saved(node, name) for name in FACTORS) if f is not None]
                if type(node).__name__ != "MulBackward0" or len({f.numel() for f in factors}) == 1 or not all(f.requires_grad for f in factors):
                    found += [(type(node).__name__, bool(f.requires_grad), int(f.numel()), sums([f])) for f in factors]
            if _KEY not in node.metadata:
                for below, _ in node.next_functions:
                    if below is not None and below not in seen:
                        seen.add(below)
                        todo.append(below)
    return found


def saved(node: Any, name: str) -> Any:
    """A tensor that the node keeps, unless a hook would have to bring it back."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return None
    try:
        tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:
        return None
    return tensor if tensor is not None and hasattr(tensor, "is_floating_point") and tensor.is_floating_point() else None


def arm() -> None:
    from . import backward

    backward.at_backward.append(_look, when=_pending)


