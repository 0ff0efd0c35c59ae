"""What the first losses are measured against: the targets that torch's own loss functions keep for their backward.

Event "loss_targets" (once, after 16 backwards or at the end): digests (packed, one a backward), numel, varied (each holds at least 8 different
numbers), shares (statements of the script that index something with the rank, where the source shows them), noise (the source measures a loss
against noise that it draws). Floating point targets on the
CPU without a gradient: whole numbers, as classes are, may well be equal by design.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import Any

from .. import digests, noisetargets, sites, syntax
from ..arm import at_close
from ..datasets import pack
from ..patching import contained, quiet
from ..state import S
from . import backward

NUM, MAX_NODES, VARIED, MAX_LOOKED_AT = 16, 48, 8, 512
RANK = re.compile(r"(?<![a-z])rank(?![a-z])")
_kept: list[int] = []
_seen: dict[str, Any] = {"numel": 0, "varied": True, "told": False, "site": None}


@contained
def _look(loss: Any) -> None:
    if _seen["told"] or S.recorder.role != "main" or getattr(loss, "grad_fn", None) is None:
        return
    target = _target(loss.grad_fn)
    if target is None or S.steps >= 4 * NUM:
        _seen["told"] = True  # another kind of loss: nobody compares a part of them
        return
    some = target.detach().flatten()[:MAX_LOOKED_AT]
    _seen["varied"] = _seen["varied"] and len(set(some.tolist())) >= VARIED
    _seen["numel"], _seen["site"] = int(target.numel()), S.loss_site
    _kept.append(digests.of_tensors([target])[1][0])
    if len(_kept) >= NUM:
        _tell()


def _target(root: Any) -> Any:
    """The first target under a loss, if it is one that can be compared."""
    import torch

    todo, seen = [root], {root}
    while todo and len(seen) < MAX_NODES:
        node = todo.pop(0)
        raw = getattr(node, "_raw_saved_target", None)
        if raw is not None:
            if getattr(raw, "unpack_hook", raw) is not None:
                return None
            target = node._saved_target
            good = type(target) is torch.Tensor and target.is_floating_point() and target.device.type == "cpu" and not target.requires_grad
            return target if good and digests.plain(target) else None
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return None


@cache
def shares(file: str) -> tuple[sites.Site, ...]:
    """Statements that take an entry or a slice of something by the rank: `chunks[rank]`, `order[rank::world]`."""
    tree = syntax.tree(file) if file else None
    found: set[sites.Site] = set()
    for node in syntax.nodes(tree) if tree is not None else ():
        if tree is not None and isinstance(node, ast.Subscript) and _names_rank(node.slice):
            found.add((file, node.lineno, getattr(syntax.function_at(tree, node.lineno), "name", "")))
    return tuple(sorted(found))


def _names_rank(index: ast.expr) -> bool:
    """`rank`, `self.rank // n`; `os.environ["RANK"]` is no place in a sequence."""
    names = [n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(index) if isinstance(n, (ast.Name, ast.Attribute))]
    return any(RANK.search(name.lower()) for name in names)


def _tell() -> None:
    if not _kept or _seen["told"]:
        return
    _seen["told"] = True
    site = _seen["site"] or S.loss_site
    S.recorder.event(
        "loss_targets", site or sites.UNKNOWN, digests=pack(_kept), numel=_seen["numel"], varied=_seen["varied"],
        shares=[sites.as_json(at) for at in shares(site[0] if site else "")[:4]], noise=noisetargets.any_of(site[0] if site else ""),
    )  # fmt: skip


def arm() -> None:
    backward.at_backward.append(_look, 4 * NUM + 1)
    at_close.append(quiet(_tell))
