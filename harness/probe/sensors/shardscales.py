"""What happens to this rank's shards of the gradients (DTensor) between the last backward and the step, where one factor explains it.

Event "shard_scale" (first 6 steps of optimizers whose gradients are DTensors): site (the statement of the script that reads the shard of a gradient,
where its source has one; else one that writes gradients), opt, scales: [[parameter, factor, unit of rounding, ranks of its mesh]], 8 at most.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

from .. import cuts, digests, factors, marks, sites, sources, syntax
from ..patching import contained
from ..state import S
from . import backward, steps

NUM_STEPS, MAX_TENSORS, NUM_VALUES = 6, 8, 24
CLOSE = 1e-4  # of the norm of the samples
_after: dict[int, dict[int, list[float]]] = {}  # id of an optimizer -> position of a parameter -> samples of its shard


def _shards(optimizer: Any) -> Iterator[tuple[int, Any, Any]]:
    """(position, gradient, this rank's part of it)."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    held = ((i, p.grad) for i, p in enumerate(params) if p.grad is not None and type(p.grad).__name__ == "DTensor")
    return itertools.islice(((i, g, part) for i, g in held if digests.plain(part := digests.local(g)) and part.is_floating_point()), MAX_TENSORS)


def _values(part: Any) -> list[float]:
    return [float(v) for v in digests.sampled(part.detach(), NUM_VALUES).tolist()]


@contained
def _left(loss: Any) -> None:
    for optimizer in marks.optimizers():
        found = {i: _values(part) for i, _, part in _shards(optimizer)}
        if found:
            _after[id(optimizer)] = found


@contained
def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    earlier = _after.pop(id(optimizer), None)
    scales = []
    for i, grad, part in _shards(optimizer) if earlier else ():
        assert earlier is not None
        unit = factors.unit(part.dtype)
        factor = factors.factor(earlier.get(i, []), _values(part), max(CLOSE, unit))
        if factor is not None:
            scales.append([witness.by_position[i], factor, unit, [int(r) for r in grad.device_mesh.mesh.flatten().tolist()]])
    if scales:
        S.recorder.event("shard_scale", _where() if any(s[1] != 1 for s in scales) else None, opt=witness.opt, scales=scales)


def _where() -> sites.Site:
    files = cuts.user_files()[: cuts.MAX_FILES]
    reads = (s for f in files if (s := reads_shard(f)) is not None)
    return next(reads, None) or next((s for f in files for s in sources.gradient_writes(f)), sites.UNKNOWN)


@cache
def reads_shard(file: str) -> sites.Site | None:
    """The first `.to_local()` or `._local_tensor` in a function that reads a `.grad`."""
    tree = syntax.tree(file)
    found = (n for n in syntax.nodes(tree) if isinstance(n, ast.Attribute) and n.attr in ("to_local", "_local_tensor")) if tree is not None else iter(())
    for node in sorted(found, key=lambda n: n.lineno):
        assert tree is not None
        scope = syntax.function_at(tree, node.lineno)
        if any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in syntax.own_nodes(scope)):
            return (file, node.lineno, getattr(scope, "name", ""))
    return None


def arm() -> None:
    backward.at_left.append(_left, NUM_STEPS)
    steps.at_step.append(_at_step, NUM_STEPS, when=_after)
