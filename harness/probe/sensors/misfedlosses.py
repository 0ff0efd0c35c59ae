"""What torch's classification losses are fed: probabilities where they want scores, scores where they want log-probabilities.

Told by the operations in the graph of the first losses; what lies between a loss and the operation that made its input may only change the shape or the
type. A compiled model shows one node and is silent. nll_loss picks scores too, where the loss has their logsumexp as a term beside it: cross entropy by
hand, a conditional random field.
Event "misfed_loss" (once a statement): site (the statement that made the loss, or its backward), loss ("cross_entropy" |
"binary_cross_entropy_with_logits" | "nll_loss" | "ctc_loss"), fed (name of the node that made its input), rows.
"""

from __future__ import annotations

from typing import Any

from .. import sources
from ..patching import contained
from ..state import S
from . import backward

LOOKED_AT = frozenset({0, 1, 2, 5, 11})  # backwards: losses in turn, or one that joins later
MAX_NODES, MAX_BETWEEN, MAX_TOLD = 96, 6, 8
OF_LOG_PROBABILITIES = {"NllLossBackward0": "nll_loss", "NllLoss2DBackward0": "nll_loss", "CtcLossBackward0": "ctc_loss"}
SQUASHED = {"LogSoftmaxBackward0": ("SoftmaxBackward0",), "BinaryCrossEntropyWithLogitsBackward0": ("SigmoidBackward0", "SoftmaxBackward0")}
RAW = ("AddmmBackward0", "MmBackward0", "BmmBackward0", "ConvolutionBackward0", "ReluBackward0", "LeakyReluBackward0")
SHAPES = (
    "View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Permute", "Squeeze", "Unsqueeze", "Clone", "ToCopy", "Slice", "Select", "Index", "Alias",
    "Flatten", "Unflatten", "Contiguous", "Split", "Cat",
)  # fmt: skip
NORMALISES, MAX_WALKED = ("LogsumexpBackward0", "LogaddexpBackward0"), 4096
LOGS = ("Log", "LogSoftmax", "LogSigmoid", "Logsumexp")
TERMS = ("Add", "Sub", "Rsub", "Neg", "Mean", "Sum", "Div", "Dot")  # and products with a number: what keeps a term of a sum one
_told: set[tuple[str, int, str]] = set()


@contained
def _look(loss: Any) -> None:
    if S.backwards - 1 not in LOOKED_AT or loss.grad_fn is None or S.loss_site is None or len(_told) >= MAX_TOLD:
        return
    found = misfed(loss.grad_fn)
    site = S.loss_site
    if found is not None and (key := (site[0], site[1], found[0])) not in _told:
        _told.add(key)
        made = sources.loss_made_at(site[0], site[1]) or site
        S.recorder.event("misfed_loss", made, loss=found[0], fed=found[1], rows=S.batch_rows)


def misfed(root: Any) -> tuple[str, str] | None:
    """(loss function, node that made its input) of the first loss below a root that is fed what it does not want."""
    todo, seen = [root], {root}
    while todo and len(seen) < MAX_NODES:
        node = todo.pop(0)
        if (found := _of(node)) is not None and not (found[1] in RAW and (_of_logs(_maker(node)) or _normalised(root, _maker(node)))):
            return found
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                todo.append(below)
    return None


def _of(node: Any) -> tuple[str, str] | None:
    name = type(node).__name__
    if name in SQUASHED and (fed := _fed(node)) in SQUASHED[name]:
        return ("cross_entropy" if name.startswith("Log") else "binary_cross_entropy_with_logits"), fed
    if name in OF_LOG_PROBABILITIES and (fed := _fed(node)) in RAW:
        return OF_LOG_PROBABILITIES[name], fed
    return None


def _fed(node: Any) -> str:
    made = _maker(node)
    return "" if made is None else type(made).__name__


def _maker(node: Any) -> Any:
    """The node that made a loss's first input, behind those that only bring it into shape."""
    for _ in range(MAX_BETWEEN):
        below = [n for n, _ in node.next_functions[:1] if n is not None]
        if not below:
            return None
        node = below[0]
        if _stem(node) not in SHAPES:
            return node
    return None


def _of_logs(made: Any) -> bool:
    """Whether a factor of this product is a logarithm already: paths through a tree of decisions, added up by a matrix."""
    factors = [n for n, _ in made.next_functions if n is not None]
    return any(_stem(n if _stem(n) not in SHAPES else _maker(n) or n) in LOGS for n in factors)


def _stem(node: Any) -> str:
    return type(node).__name__.removesuffix("0").removesuffix("1").removesuffix("Backward")


def _normalised(root: Any, made: Any) -> bool:
    """Whether a term of the loss is a logsumexp over what this node made; a penalty on its square is none."""
    todo, seen = [root], {root}
    while todo and len(seen) < MAX_NODES:
        node = todo.pop(0)
        below = [n for n, _ in node.next_functions if n is not None]
        if type(node).__name__ in NORMALISES:
            if _reaches(node, made):
                return True
        elif _stem(node) in TERMS or _stem(node) in SHAPES or (_stem(node) == "Mul" and len(below) == 1):
            todo += [n for n in below if n not in seen]
            seen.update(below)
    return False


def _reaches(node: Any, wanted: Any) -> bool:
    todo, seen = [node], {node}
    while todo and len(seen) < MAX_WALKED:
        node = todo.pop()
        if node is wanted:
            return True
        below = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(below)
        todo += below
    return bool(todo)  # not known: not told


def arm() -> None:
    backward.at_left.append(_look, end=max(LOOKED_AT) + 1)
