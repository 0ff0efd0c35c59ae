"""`rank + worker.id`, and the stride by which a stream is parted, as they stand in its own code: a number that two readers share, where
`rank * num_workers + worker.id` was meant, and every world_size-th where the ranks have workers.

Only a place to point at: names are taken at their word, and what the workers read decides.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from . import copyreads, sites, strides, syntax

ENTRIES = frozenset({"__init__", "__iter__", "__next__"})
RANK = re.compile(r"rank(\(\))?$", re.IGNORECASE)
WORKER = re.compile(r"(\bid|\bwid|worker\w*|worker_?id)$", re.IGNORECASE)


def of(loader: Any) -> dict[str, Any]:
    """Both, of a stream that several workers read."""
    return {"reader_sum": told(loader.dataset), "reader_stride": stride(loader.dataset)} if loader.num_workers > 1 else {}


def told(dataset: Any) -> dict[str, Any] | None:
    """The site of the first such sum; None where there is none."""
    for file, method in copyreads.sources(type(dataset), ENTRIES):
        for node in syntax.nodes(method):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _sum(node.left, node.right):
                return sites.as_json((file, node.lineno, getattr(method, "name", "")))
    return None


def stride(dataset: Any) -> dict[str, Any] | None:
    """The site of the first expression that takes every n-th sample; None where there is none."""
    for file, method in copyreads.sources(type(dataset), ENTRIES):
        for node, _, _ in strides.taken(method):
            return sites.as_json((file, node.lineno, getattr(method, "name", "")))
    return None


def _sum(left: ast.expr, right: ast.expr) -> bool:
    one, other = (ast.unparse(side) if isinstance(side, (ast.Name, ast.Attribute, ast.Call)) else "" for side in (left, right))
    return any(RANK.search(a) and WORKER.search(b) and not RANK.search(b) for a, b in ((one, other), (other, one)))
