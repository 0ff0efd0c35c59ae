"""What stands at the root of a loss's graph: the last operations, how it was reduced."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

MAX_TERMS = 16
SMOOTHING = "MulBackward1"  # by a number inside of torch, as for label_smoothing; a script's `loss * 0.5` is MulBackward0


def root_of(loss: Any) -> tuple[list[str], str, bool]:
    """(names of the last operations, reduction, whether a scalar factor or quotient stands at the root)."""
    chain: list[str] = []
    scaled, reduction = False, ""
    node = loss.grad_fn
    for _ in range(6):
        if node is None:
            break
        name = type(node).__name__
        chain.append(name)
        if name.startswith(("DivBackward", "MulBackward")) and name != SMOOTHING:
            scaled = True
        stated = getattr(node, "_saved_reduction", None)
        if isinstance(stated, int):
            reduction = {0: "none", 1: "mean", 2: "sum"}.get(stated, "")
            break
        if name == "SumBackward0":
            sizes = getattr(node, "_saved_self_sym_sizes", None)
            reduction = "" if sizes is not None and math.prod(sizes) == 1 else "sum"  # of one element: nothing is reduced
            break
        if name in ("MeanBackward0", "MeanBackward1"):
            reduction = "mean"
            break
        following = [n for n, _ in node.next_functions if n is not None]
        if not following:
            break
        node = following[0]
    return chain, reduction, scaled


def of_terms(loss: Any, rows: int) -> bool:
    """Whether the sum at the root adds up numbers that were stacked one by one and are no sums themselves, in another count than the batch's rows:
    tasks or layers, and not samples."""
    node = loss.grad_fn
    for _ in range(6):
        if node is None or type(node).__name__ == "SumBackward0":
            break
        node = next((n for n, _ in node.next_functions if n is not None), None)
    sizes = tuple(getattr(node, "_saved_self_sym_sizes", None) or ())
    stack = _stacked(node, sizes) if len(sizes) == 1 and rows and sizes[0] != rows else None
    terms = [n for n, _ in stack.next_functions if n is not None] if stack is not None else []
    return bool(terms) and all(math.prod(shape_of(t)) == 1 and root_of(SimpleNamespace(grad_fn=t))[1] != "sum" for t in terms)


def _stacked(node: Any, sizes: tuple[int, ...]) -> Any:
    """The stack or cat below a node, with nothing but operations of the same shape between."""
    todo, seen = [n for n, _ in node.next_functions], set[Any]()
    while todo and len(seen) < 32:
        one = todo.pop(0)
        if one is None or one in seen or shape_of(one) != sizes:
            continue
        if type(one).__name__ in ("StackBackward0", "CatBackward0"):
            return one
        seen.add(one)
        todo.extend(n for n, _ in one.next_functions)
    return None


def shape_of(node: Any) -> tuple[int, ...]:
    """Of what a node made; () where torch does not tell, as for a number."""
    told = getattr(node, "_input_metadata", None)
    return tuple(told[0].shape) if told else ()


def divisor_of(loss: Any) -> tuple[float, tuple[float, ...]] | None:
    """(the whole number above 1 that the loss was divided by last, as a count of samples or tokens is, or every term of a sum was; the numbers that
    the terms are multiplied by then); None for any other."""
    terms = list(islice(_quotients(loss.grad_fn, 1.0, 0), MAX_TERMS + 1))
    value = terms[0][0] if terms else 0.0
    alike = len(terms) <= MAX_TERMS and all(v == value for v, _ in terms)
    return (value, tuple(f for _, f in terms)) if alike and 1 < value < math.inf and value == int(value) else None


def _quotients(node: Any, factor: float, depth: int) -> Iterator[tuple[float, float]]:
    """(what it is divided by, or 0; what it is multiplied by) of each term."""
    name = type(node).__name__
    if name == "AddBackward0" and depth < MAX_TERMS and getattr(node, "_saved_alpha", 1) == 1:
        for term in (n for n, _ in node.next_functions if n is not None):
            yield from _quotients(term, factor, depth + 1)
    elif name == "MulBackward0" and depth and (found := number(node, "other") or number(node, "self")):
        yield from _quotients(next((n for n, _ in node.next_functions if n is not None), None), factor * found, depth + 1)
    else:
        yield number(node, "other") if name == "DivBackward0" else 0.0, factor


def number(node: Any, operand: str) -> float:
    """0 where it is no single number, or part of the graph itself. Not read from a device, nor where a hook would have to bring it back."""
    raw = getattr(node, f"_raw_saved_{operand}", None)
    if raw is None or getattr(raw, "unpack_hook", raw) is not None:
        return 0.0
    other = getattr(node, f"_saved_{operand}", None)
    if other is None or not getattr(other, "is_cpu", False) or other.numel() != 1 or other.requires_grad or other.is_complex():
        return 0.0
    return float(other.item())


def has_function(loss: Any) -> bool:
    """Whether a function written in Python, as the collectives with a gradient are, stands near the root."""
    return any(hasattr(type(node), "_forward_cls") for node in _near(loss))


def _near(loss: Any) -> Iterator[Any]:
    """The nodes nearest to the root first, a bounded number."""
    todo, seen = [loss.grad_fn], set[Any]()
    while todo and len(seen) < 256:
        node = todo.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        todo.extend(n for n, _ in node.next_functions)


def is_surrogate(loss: Any) -> bool:
    """Whether the loss is the sum of a product with a constant of both signs: gradients of an earlier backward that are handed on, as by
    GradCache."""
    node = loss.grad_fn
    while node is not None and type(node).__name__ in ("SumBackward0", "SumBackward1", "ViewBackward0", "ReshapeAliasBackward0"):
        node = node.next_functions[0][0] if node.next_functions else None
    for name in (
        ("other", "self") if type(node).__name__ == "MulBackward0" else ("tensor", "self") if type(node).__name__ == "DotBackward0" else ()
    ):
        raw = getattr(node, f"_raw_saved_{name}", None)
        factor = getattr(node, f"_saved_{name}", None) if raw is not None and getattr(raw, "unpack_hook", raw) is None else None
        if factor is not None and not factor.requires_grad and factor.is_floating_point() and factor.numel() > 1:
            return bool((factor > 0).any() and (factor < 0).any())
    return False
