"""What happens to this rank's part of a flat gradient between the reduce_scatter that made it and the next collective that moves parameters.

A flat vector is cut by numbers of elements: its parts are of one gradient, wherever the layers begin. Looked at in the first steps: plain vectors on the
CPU that a call of the script's own filled and waited for. What is gathered again as it is (a reduction in two halves, a code of fewer bits) is no part
that a rank steps with, and is let go. So is what is reduced without a backward before, and where no norm is taken behind the call: a factor may be a count.
Event "shard_scale" (see sensors/shardscales.py), with flat: the parameter is called by the collective, opt counts the parts of a step from -1 downwards.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from . import digests, factors, protocol, sites, syntax
from .patching import quiet
from .state import S

CALLS, NUM_STEPS, MAX_PARTS, NUM_VALUES, CLOSE = set(protocol.REDUCE_SCATTER_INTO), 6, 4, 24, 1e-4
SETTLES = {"all_gather", *protocol.GATHER_INTO, *CALLS}
NORMS = {"norm", "vector_norm", "square", "pow", "dot"}


@dataclass(frozen=True)
class Part:
    """What a reduce_scatter left in `tensor`, by samples."""

    tensor: weakref.ref[Any]
    op: str
    site: sites.Site
    step: int
    ranks: Sequence[int]
    values: list[float]


_open: list[Part] = []


@quiet
def settle(op: str, given: Sequence[Any]) -> None:
    """Before a call that moves parameters, or fills a part again. `given`: its arguments."""
    if not _open:
        return
    moved = {digests.address(t) for t in given if hasattr(t, "data_ptr")} - {0}
    held = [(part, tensor, digests.address(tensor) in moved) for part in _open if (tensor := part.tensor()) is not None]
    refills = op in CALLS
    _open[:] = [part for part, _, among in held if refills and not among]
    for i, (part, tensor, among) in enumerate(held):
        if among is refills and S.steps - part.step <= 1:
            _tell(part, tensor, -1 - i)


def _tell(part: Part, tensor: Any, number: int) -> None:
    unit = factors.unit(tensor.dtype)
    factor = factors.factor(part.values, _values(tensor), max(CLOSE, unit))
    if factor is not None and (site := measured(*part.site)) is not None:
        scales = [[f"the output of {part.op}", factor, unit, list(part.ranks)]]
        S.recorder.event("shard_scale", site, opt=number, scales=scales, flat=True)


@quiet
def note(op: str, args: Any, kwargs: Any, site: sites.Site) -> None:
    """After a reduce_scatter that is done."""
    import torch.distributed as dist

    out = args[0] if args else kwargs.get("output")
    group = kwargs.get("group") or next((a for a in args if type(a).__name__ == "ProcessGroup"), None)
    if S.since.num_backward and len(_open) < MAX_PARTS and digests.plain(out) and out.is_cpu and out.dim() == 1 and out.is_floating_point():
        _open.append(Part(weakref.ref(out), op, site, S.steps, dist.get_process_group_ranks(group), _values(out)))


def _values(tensor: Any) -> list[float]:
    return [float(v) for v in digests.sampled(tensor.detach(), NUM_VALUES).tolist()]


@cache
def measured(file: str, line: int, name: str) -> sites.Site | None:
    """The first statement behind the call, in its function, that takes a norm."""
    tree = syntax.tree(file)
    own = syntax.own_nodes(syntax.function_at(tree, line)) if tree is not None else ()
    lines = [n.lineno for n in own if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in NORMS and n.lineno > line]
    return (file, min(lines), name) if lines else None
