"""A stream that asks torch.distributed for its rank where it runs in workers that are no forks: a process group is not handed on to them, and
`dist.is_initialized()` is False there. Only a place to point at: what the workers read decides."""

from __future__ import annotations

import ast
import multiprocessing
from typing import Any

from . import copyreads, sites, syntax

ENTRIES = frozenset({"__iter__", "__next__"})  # the constructor runs in the rank
ASKS = frozenset({"is_initialized", "get_rank", "get_world_size"})


def told(loader: Any) -> dict[str, Any] | None:
    """The site of the first such question."""
    if not loader.num_workers or _method(loader) == "fork":
        return None
    asked = [
        (file, node.lineno, method.name)
        for file, method in copyreads.sources(type(loader.dataset), ENTRIES)
        for node in syntax.nodes(method)
        if isinstance(node, ast.Call) and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")) in ASKS
    ]
    return sites.as_json(min(asked)) if asked else None


def _method(loader: Any) -> str:
    context: Any = getattr(loader, "multiprocessing_context", None)
    method = context.get_start_method() if hasattr(context, "get_start_method") else None
    return str(method or multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0])
