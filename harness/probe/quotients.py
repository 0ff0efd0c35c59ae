"""By which single numbers a loss is divided and multiplied on the way from its root down to the sums over samples.

Read from the graph right before its backward, while what it saved is there. Nothing of it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from . import roots

MAX_VISITS, MAX_NUMBERS = 192, 16
MAX_BELOW = 8  # operations under a quotient in which a factor is still looked for: further down is the model
SINKS = ("_DDPSinkBackward",)  # DDP's own function at the model's outputs
MODEL = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "ConvolutionBackward0", "EmbeddingBackward0", "AccumulateGrad", *SINKS)


class Quotient(NamedTuple):
    """The division of a part of the loss by one number. `same`: what was divided by is the very tensor that was asked for."""

    value: float
    same: bool
    above: tuple[float, ...]  # factors between it and the root
    below: tuple[float, ...]  # factors found under it
    mean: bool  # what is divided is a mean already


def look(loss: Any, wanted: Any) -> list[Quotient] | None:
    """None where the graph cannot be read to the end: too large, or a function written in Python, as collectives with a gradient are.
    `wanted(tensor)`: whether it is one that was asked for."""
    found: list[Quotient] = []
    visits = [0, 0]
    try:
        _down(loss.grad_fn, (), found, visits, wanted)
    except Unreadable:
        return None
    return found


class Unreadable(Exception):
    pass


def _down(node: Any, above: tuple[float, ...], found: list[Quotient], visits: list[int], wanted: Any) -> None:
    """The part above the quotients."""
    while node is not None and type(node).__name__ not in MODEL:
        visit(node, visits)
        number = number_of(node, visits)
        if number is not None and type(node).__name__ == "DivBackward0":
            tensor, value = number
            mean = roots.root_of(SimpleNamespace(grad_fn=node))[1] == "mean"
            found.append(Quotient(value, bool(wanted(tensor)), above, tuple(_under(node, visits)), mean))
            above = (*above, 1 / value if value else 0.0)
        elif number is not None:
            above = (*above, number[1])
        following = [n for n, _ in node.next_functions if n is not None]
        for other in following[1:]:
            _down(other, above, found, visits, wanted)
        node = following[0] if following else None


def _under(node: Any, visits: list[int]) -> Iterator[float]:
    """Factors within a few operations under a quotient."""
    layer = [n for n, _ in node.next_functions if n is not None]
    for _ in range(MAX_BELOW):
        layer = [n for n in layer if type(n).__name__ not in MODEL]
        for one in layer:
            visit(one, visits)
            if (number := number_of(one, visits)) is not None:
                yield number[1] if type(one).__name__ == "MulBackward0" else 1 / number[1] if number[1] else 0.0
        layer = list(dict.fromkeys(n for one in layer for n, _ in one.next_functions if n is not None))


def visit(node: Any, visits: list[int]) -> None:
    visits[0] += 1
    weighed = type(node).__name__ in ("AddBackward0", "SubBackward0") and getattr(node, "_saved_alpha", 1) != 1
    if visits[0] > MAX_VISITS or hasattr(type(node), "_forward_cls") or weighed or "allreduce" in type(node).__name__.lower().replace("_", ""):
        raise Unreadable


def number_of(node: Any, visits: list[int]) -> tuple[Any, float] | None:
    """The one number, no part of the graph itself, that a product or quotient is made with."""
    name = type(node).__name__
    for field in ("other",) if name == "DivBackward0" else ("other", "self") if name == "MulBackward0" else ():
        raw = getattr(node, f"_raw_saved_{field}", None)
        if raw is None or getattr(raw, "unpack_hook", raw) is not None:
            continue
        tensor = getattr(node, f"_saved_{field}", None)
        if tensor is None or tensor.numel() != 1 or tensor.requires_grad or tensor.is_complex():
            continue
        visits[1] += 1
        if visits[1] > MAX_NUMBERS:
            raise Unreadable
        return tensor, float(tensor.item())
    return None
