"""What the first losses of a worker process of the script's own (hogwild) are measured against.

Event "worker_aims" (once, after 16 backwards or at the end): digests (packed, one a backward, of all targets that torch's losses keep; 0: of none that
can be read), by_number (the source takes an entry of something by an argument of the function that runs the backward: its own task, its own part).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from .. import digests, sites, syntax
from ..arm import at_close
from ..datasets import pack
from ..patching import contained, quiet
from ..state import S
from . import backward

NUM, MAX_NODES = 16, 48
_aims: list[int] = []
_told = [False]


@contained
def _look(loss: Any) -> None:
    if _told[0] or S.recorder.role != "child" or S.group is not None or S.compiling:
        return
    targets = list(kept_targets(loss))
    readable = bool(targets) and all(t is not None for t in targets)
    _aims.append(crc32(repr([digests.of_tensors([t])[1][0] for t in targets]).encode()) or 1 if readable else 0)
    if len(_aims) >= NUM:
        _tell()


def kept_targets(loss: Any) -> Iterator[Any]:
    """The targets that the losses under a loss keep for their backward; None for one that cannot be read or that is computed with gradients."""
    import torch

    root = getattr(loss, "grad_fn", None)
    todo = [root] if root is not None else []
    seen = set(todo)
    while todo and len(seen) < MAX_NODES:
        node = todo.pop(0)
        raw = getattr(node, "_raw_saved_target", None)
        if raw is not None:
            target = node._saved_target if getattr(raw, "unpack_hook", raw) is None else None
            good = type(target) is torch.Tensor and target.device.type == "cpu" and not target.requires_grad and digests.plain(target)
            yield target if good else None
            continue
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)


def by_number(site: sites.Site) -> bool:
    """`targets[rank]`, `tasks[k]`: an argument of the function is a place in something that it reads."""
    tree = syntax.tree(site[0]) if site[0] else None
    scope = syntax.function_at(tree, site[1]) if tree is not None else None
    if not isinstance(scope, syntax.FUNCTIONS):
        return False
    own = syntax.own_nodes(scope)
    stored = {n.id for n in own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    arguments = {a.arg for a in (*scope.args.posonlyargs, *scope.args.args)} - stored
    reads = [n for n in own if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Load)]
    return any(isinstance(n.slice, ast.Name) and n.slice.id in arguments for n in reads)


def _tell() -> None:
    if _aims and not _told[0]:
        _told[0] = True
        S.recorder.event("worker_aims", digests=pack(_aims), by_number=by_number(S.loss_site or sites.UNKNOWN))


def arm() -> None:
    backward.at_backward.append(_look)
    at_close.append(quiet(_tell))
