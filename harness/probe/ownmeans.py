"""How each term of a loss is reduced to one number, over what, and by which numbers that is multiplied and divided then.

What tells a mean by hand, `loss.sum() / len(x)`, from a sum that is divided by the batch of all ranks. Read from the graph right before its backward,
while what it saved is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from . import roots

MAX_STEPS = 24  # nodes on the way from the root to the end of one term
# Of one number still the number.
ALIKE = ("Squeeze", "Unsqueeze", "View", "Reshape", "UnsafeView", "Clone", "ToCopy", "Alias", "Select", "Contiguous", "Neg", "Add", "Sub")


class Term(NamedTuple):
    outer: float  # product of the numbers above the first sum of terms; 1 where there is none
    factor: float  # of those between it and the reduction; both without their sign
    mean: bool  # reduced to a mean, else to a sum
    sizes: tuple[int, ...]  # of what is reduced, without the classes of a class score


def terms_of(loss: Any) -> list[Term]:
    """Those that end in a mean or in a sum; the others are left out. [] where there are more terms than are read."""
    ends = list(islice(_ends(loss.grad_fn, None, 1.0, 0), roots.MAX_TERMS + 1))
    found = [Term(abs(outer or 1.0), abs(factor), *_reduced(node)) for node, outer, factor in ends] if len(ends) <= roots.MAX_TERMS else []
    return [term for term in found if math.prod(term.sizes) > 1]


def _ends(node: Any, outer: float | None, factor: float, depth: int) -> Iterator[tuple[Any, float | None, float]]:
    """(the node where a term is reduced to one number, the products above the first sum and below it)."""
    while node is not None and depth < MAX_STEPS:
        depth += 1
        name = type(node).__name__
        following = [n for n, _ in node.next_functions if n is not None]
        if name == "AddBackward0" and len(following) == 2 and all(type(n).__name__ == roots.SMOOTHING for n in following):
            following = [n for n, _ in following[0].next_functions]  # the loss by itself tells how its smoothed form is reduced
        elif name.startswith(("AddBackward", "SubBackward")) and len(following) > 1 and getattr(node, "_saved_alpha", 1) == 1:
            for term in following:
                yield from _ends(term, *((factor, 1.0) if outer is None else (outer, factor)), depth)
            return
        elif name.startswith(("DivBackward", "MulBackward")):
            number = roots.number(node, "other") or (roots.number(node, "self") if name.startswith("Mul") else 0.0)
            if not number:
                return
            factor = factor / number if name.startswith("Div") else factor * number
        elif not name.startswith(ALIKE):
            yield node, outer, factor
            return
        node = following[0] if following else None


def _reduced(node: Any) -> tuple[bool, tuple[int, ...]]:
    """(whether to its mean, shape of what is reduced); () for any other operation."""
    name = type(node).__name__
    stated = {1: True, 2: False}.get(getattr(node, "_saved_reduction", None) or 0)
    if stated is not None:
        sizes = roots.shape_of(next((n for n, _ in node.next_functions if n is not None), None))
        return stated, sizes[:1] + sizes[2:] if name.startswith("NllLoss") else sizes
    if name in ("SumBackward0", "MeanBackward0") or (name in ("SumBackward1", "MeanBackward1") and roots.shape_of(node) == ()):
        return name.startswith("Mean"), tuple(int(n) for n in getattr(node, "_saved_self_sym_sizes", None) or ())
    return False, ()
