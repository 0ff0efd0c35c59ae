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
MAX_BELOW, SUM_NEAR = 8, 1e-3
# Of one number still the number.
ALIKE = ("Squeeze", "Unsqueeze", "View", "Reshape", "UnsafeView", "Clone", "ToCopy", "Alias", "Select", "Contiguous", "Neg", "Add", "Sub")


class Term(NamedTuple):
    outer: float  # product of the numbers above the first sum of terms; 1 where there is none
    factor: float  # of those between it and the reduction, and right below that; both without their sign
    mean: bool  # reduced to a mean, else to a sum
    sizes: tuple[int, ...]  # of what is reduced, without the classes of a class score


def terms_of(loss: Any) -> list[Term]:
    """Those that end in a mean or in a sum; the others are left out. [] where there are more terms than are read."""
    ends = list(islice(_ends(loss.grad_fn, None, 1.0, 0), roots.MAX_TERMS + 1))
    return [term for end in ends if (term := _term(*end)) is not None] if len(ends) <= roots.MAX_TERMS else []


def _term(node: Any, outer: float | None, factor: float) -> Term | None:
    mean, sizes = _reduced(node)
    factor = abs(factor * _below(node, mean)) if math.prod(sizes) > 1 else 0.0
    return Term(abs(outer or 1.0), factor, mean, sizes) if factor else None


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
    """(whether to its mean, shape of what is reduced); () for any other operation, and for a sum that leaves some of it out, so that its shape tells no
    count."""
    name = type(node).__name__
    stated = {1: True, 2: False}.get(getattr(node, "_saved_reduction", None) or 0)
    if stated is not None:
        sizes = roots.shape_of(next((n for n, _ in node.next_functions if n is not None), None))
        if name.startswith("NllLoss"):
            sizes = sizes[:1] + sizes[2:]
            return stated, sizes if stated or _counts_all(node, math.prod(sizes)) else ()
        return stated, sizes
    if name in ("SumBackward0", "MeanBackward0") or (name in ("SumBackward1", "MeanBackward1") and roots.shape_of(node) == ()):
        return name.startswith("Mean"), tuple(int(n) for n in getattr(node, "_saved_self_sym_sizes", None) or ())
    return False, ()


def _counts_all(node: Any, num: int) -> bool:
    """No target is left out or weighed. Not read from a device."""
    raw = getattr(node, "_raw_saved_total_weight", None)
    total = getattr(node, "_saved_total_weight", None) if raw is not None and getattr(raw, "unpack_hook", raw) is None else None
    return total is not None and total.is_cpu and total.numel() == 1 and float(total) == num


def _below(node: Any, mean: bool) -> float:
    """By which number each sample is multiplied before all are reduced; 0 where a sum is one of samples with a mask or weights of their own, which are
    fewer than its shape tells."""
    factor = 1.0
    node = _first(node)
    for _ in range(MAX_BELOW):
        name, inputs = type(node).__name__, sum(n is not None for n, _ in getattr(node, "next_functions", ()))
        if inputs != 1 or not name.startswith((*ALIKE, "DivBackward", "MulBackward", "SumBackward1", "MeanBackward1")):
            return factor
        if name.startswith(("DivBackward", "MulBackward")):
            number = roots.number(node, "other") or (roots.number(node, "self") if name.startswith("Mul") else 0.0)
            if not number and not mean and not _is_distribution(node):
                return 0.0
            factor = factor / (number or 1.0) if name.startswith("Div") else factor * (number or 1.0)
        node = _first(node)
    return factor


def _is_distribution(node: Any) -> bool:
    """What the graph's part is multiplied by are shares of classes, as the targets of a distillation are."""
    for operand in ("other", "self"):
        raw = getattr(node, f"_raw_saved_{operand}", None)
        given = getattr(node, f"_saved_{operand}", None) if raw is not None and getattr(raw, "unpack_hook", raw) is None else None
        if given is not None and not given.requires_grad and given.is_cpu and given.dim() > 1 and given.is_floating_point():
            return bool(((given.sum(-1) - 1).abs() < SUM_NEAR).all())
    return False


def _first(node: Any) -> Any:
    return next((n for n, _ in node.next_functions if n is not None), None) if node is not None else None
