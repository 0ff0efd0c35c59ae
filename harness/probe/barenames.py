"""What the script calls the tensors that an optimizer holds and no module owns: `self.log_alpha` is `param[0][0]` otherwise.

For messages only: a name that some frame happens to have is nothing to line ranks up by.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from . import heldvalues

MAX_BARE = 4
_walks_left = [16]  # over what the frames hold, one a tensor, up to 4 ms each


def told(names: list[str], params: list[Any], owned: list[bool]) -> dict[str, str]:
    """Name by position -> variable or attribute; left out where two of them share one, as the parts of a list do."""
    bare = [(n, p) for n, p, is_owned in zip(names, params, owned, strict=True) if not is_owned]
    if not bare or len(bare) > MAX_BARE or _walks_left[0] < len(bare):
        return {}
    _walks_left[0] -= len(bare)
    found = {n: name for n, p in bare if (name := _name(p))}
    used = Counter(found.values())
    return {n: name for n, name in found.items() if used[name] == 1}


def _name(param: Any) -> str:
    """An attribute's, else the outermost variable's: those of inner functions are what it was handed on as."""
    held = [h.name for h in heldvalues.tensors(sys._getframe(2), param.shape) if h.tensor is param]
    attributes = [n.name for n in held if n.line == heldvalues.ATTRIBUTE]
    return attributes[0] if attributes else held[-1].name if held else ""
