"""Running statistics that a checkpoint does not bring: batch norm in eval mode then divides by a variance of 1.

Event "blank_stats": see states.py. Looked at where a load leaves out `running_mean` of a layer whose weight it gives, and once more when the
module is called in eval mode: the script may copy the statistics itself, or train first.
"""

from __future__ import annotations

import weakref
from typing import Any

from .. import sites
from ..state import S
from . import modes, saving

STAT = "running_mean"
_waiting: list[tuple[weakref.ref[Any], list[str], sites.Site, str]] = []  # module, names of its blank means, where it was loaded, the file


def look(module: Any, own: dict[str, Any], given: dict[str, Any], missing: list[str], site: sites.Site) -> None:
    """Before a load. Reads buffers only where some are missing beside weights that are not: one look, on a device one wait."""
    gone = set(missing)
    left = [k for k in missing if k.endswith(STAT) and (weight := k[: -len(STAT)] + "weight") in own and weight not in gone]
    names = [k for k in left[:64] if _blank(own[k])]
    _waiting[:] = [w for w in _waiting if w[0]() is not None and w[0]() is not module][:16]
    if names:
        _waiting.append((weakref.ref(module), names, site, saving.source_of([v for v in given.values() if hasattr(type(v), "data_ptr")])))


def _blank(mean: Any) -> bool:
    return bool(mean.numel() and not mean.any())


def _at_eval_forward(root: Any) -> None:
    """A module in eval mode was called: the one that waits, or one that holds it."""
    if not _waiting:
        return
    for entry in list(_waiting):
        module = entry[0]()
        if module is None or (not module.training and any(m is module for m in root.modules())):
            _waiting.remove(entry)
            buffers = dict(module.named_buffers()) if module is not None else {}
            names = [n for n in entry[1] if n in buffers and _blank(buffers[n])]
            if names:
                S.recorder.event("blank_stats", entry[2], names=names, num=len(names), source=entry[3], module=type(module).__name__)


def arm() -> None:
    modes.at_eval_forward.append(_at_eval_forward)
