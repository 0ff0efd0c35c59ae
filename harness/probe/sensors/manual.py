"""Steps without an optimizer: hand-written updates, hogwild, `torch.autograd.grad` loops. A step is seen at the next backward, when the
leaves that the last backward reached have changed although no optimizer stepped.
"""

from __future__ import annotations

import math
import time
import weakref
from typing import Any

from .. import digests, marks, names, protocol, sites, sources
from ..arm import at_close
from ..patching import quiet
from ..state import S

_leaves: list[weakref.ref[Any]] = []
_last: list[int] = []
_names_told = [False]
_counts = {"optimizer_steps": 0, "moved": 0}
MAX_NODES = 20_000


def leaves(loss: Any) -> dict[int, Any]:
    """Parameters that a backward from `loss` reaches: id -> tensor. One walk over the graph, bounded."""
    found: dict[int, Any] = {}
    todo, seen = [loss.grad_fn], set[Any]()
    while todo and len(seen) < MAX_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found[id(variable)] = variable
        todo.extend(n for n, _ in node.next_functions)
    return found


def look() -> None:
    """Called before each backward: write a row if the leaves of the last one have changed by hand since."""
    if S.recorder.role == "child" and S.backwards <= LOOKED_FOR_SHARED:
        _look_for_unshared()
    if S.steps_by_optimizer != _counts["optimizer_steps"]:  # asked first: it is so at every step of a script that has an optimizer
        _counts["optimizer_steps"] = S.steps_by_optimizer
        _last[:] = []
        return
    from . import steps

    if not _leaves or steps.under_way():
        return
    params = [ref() for ref in _leaves]
    each = digests.of_tensors(params)[1]
    # what is gone has not been updated: activations that a pipeline receives are leaves too
    if any(p is not None and new != old for p, new, old in zip(params, each, _last, strict=False)):
        if _is_moved_for_an_optimizer(params):
            return  # what they were before stays what they began with
        _write(params, each)
    _last[:] = each


def _is_moved_for_an_optimizer(params: list[Any]) -> bool:
    """The first time only: weights that an optimizer holds are moved between two backwards of its step, as SAM does; without one they go on moving."""
    _counts["moved"] += 1
    return _counts["moved"] == 1 and any(p is held for o in marks.optimizers() for g in o.param_groups for held in g["params"] for p in params)


LOOKED_FOR_SHARED = 4  # backwards
_was_shared: list[Any] = []  # weak references of leaves that lay in shared memory after the first backward of a worker


def _look_for_unshared() -> None:
    """Event "unshared" (in a worker, once): num (leaves that lay in shared memory before and do not now), at (statements that could have done it)."""
    lost = [p for ref in _was_shared if (p := ref()) is not None and not p.is_shared()]
    if lost:
        _was_shared.clear()
        S.recorder.event("unshared", num=len(lost), at=[sites.as_json(s) for s in sources.rebinds(S.loss_site[0])] if S.loss_site else [])


def _write(params: list[Any], each: list[int]) -> None:
    from . import ddp, steps

    if not _names_told[0]:
        _names_told[0] = True
        living = [p for p in params if p is not None]
        table, roots = names.owners(living)
        _roots[:] = [weakref.ref(r) for r in roots]
        S.recorder.event(
            protocol.PARAMS, opt=protocol.OPT_BY_HAND, kind="by hand",
            names=[table.get(id(p), f"param[{i}]") if p is not None else f"param[{i}]" for i, p in enumerate(params)],
            numels=[0 if p is None else p.numel() for p in params], shapes=[[] if p is None else list(p.shape) for p in params],
            dtypes=[], devices=sorted({str(p.device) for p in living}), ddp=[-1 if p is None else ddp.wrap_of(p) for p in params], owned=[True] * len(params),
            shared=sum(p.is_shared() for p in living if p.device.type == "cpu"), requires_grad=[True] * len(params),
            roots=[type(r).__name__ for r in roots], groups=[], slices=1, param_bytes=sum(p.numel() * p.element_size() for p in living),
        )  # fmt: skip
        S.recorder.event("initial", opt=protocol.OPT_BY_HAND, each=_last[:4096])
    digest = digests.wide(b"".join(v.to_bytes(4, "little") for v in each))
    step = S.steps
    steps.write_row(protocol.OPT_BY_HAND, protocol.FLAG_CHANGED, time.perf_counter(), grad=0, param=digest, full=0, none=0, hyper=0, train=0, lr=math.nan)
    if protocol.detail_kept(step, len(each)):
        S.recorder.detail(step, protocol.OPT_BY_HAND, [0] * len(each), each)


_roots: list[weakref.ref[Any]] = []


def roots_in_eval() -> bool:
    """Whether a model that is trained is in eval mode; known for optimizers' and hand-trained models alike."""
    from . import steps

    for refs in (_roots, *(witness.roots for witness in list(steps._known.values()))):
        for ref in refs:
            root = ref()
            if root is not None and not root.training and any(True for _ in root.children()):
                return True
    return False


def remember(loss: Any) -> None:
    """Called after a backward without any optimizer so far: the leaves are what may be updated by hand, parameters where there are any."""
    if S.steps_by_optimizer or (_leaves and (S.backwards > 3 or _counts["moved"])):
        return
    import torch

    reached = list(leaves(loss).values())
    reached = [v for v in reached if isinstance(v, torch.nn.Parameter)] or reached
    _leaves[:] = [weakref.ref(v) for v in reached]
    _last[:] = digests.of_tensors(reached)[1]
    if S.recorder.role == "child" and S.backwards == 1:
        _was_shared[:] = [weakref.ref(v) for v in reached if v.device.type == "cpu" and v.is_shared()]


def arm() -> None:
    """Nothing to patch: backward.py calls. The last step has no backward behind it."""
    at_close.append(quiet(look))
