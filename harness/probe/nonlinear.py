"""Which number the ranks are about to average, as the source shows it: a metric that is no mean over samples, and how it is computed.

Followed from the call of the collective back through assignments, the user's own functions and, out of a helper, to its caller. Read once a
call site, a few ms. F1 of a whole set is no mean of the F1 of its parts; an accuracy, or a mean per sample, is one over equal parts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import sites, syntax

METRIC = re.compile(
    r"(?<![a-z])(f1|f_?beta|f_?score|auc|auroc|auprc|roc_auc|average_precision|precision|recall|sensitivity|specificity|m?iou|jaccard|kappa"
    r"|mcc|matthews\w*|r2|pearson\w*|spearman\w*|corrcoef|correlation|perplexity|ppl|bleu|rmse)(?![a-z])"
)
PER_SAMPLE = re.compile(r"(^|_)at(_|\d)|@|top|hit|(prec|precision|recall)_?\d|^r_?(1|5|10)$|loss|(?<!balanced_)acc")  # recall@k and the like are means
BY_NAME = re.compile(r"iou|jaccard|bleu")  # often meant a sample or a sentence: the name alone says nothing
CALLS = (
    "f1_score", "fbeta_score", "precision_score", "recall_score", "precision_recall_fscore_support", "roc_auc_score", "average_precision_score",
    "average_precision", "auroc", "jaccard_score", "jaccard_index", "cohen_kappa_score", "cohen_kappa", "matthews_corrcoef", "r2_score",
    "balanced_accuracy_score", "corpus_bleu", "pearsonr", "spearmanr", "pearson_corrcoef", "spearman_corrcoef", "corrcoef",
)  # fmt: skip
SUMS = {"sum", "count_nonzero", "bincount", "logical_or", "diag", "diagonal", "nansum"}
MODULES = {"torch", "np", "numpy", "math", "F"}
THROUGH = {
    "tensor", "as_tensor", "Tensor", "FloatTensor", "DoubleTensor", "stack", "cat", "array", "to", "float", "double", "cuda", "cpu", "clone",
    "detach", "item", "contiguous", "unsqueeze", "reshape", "view", "squeeze", "nan_to_num", "clamp", "clamp_min", "clip", "mean", "nanmean",
    "round",
}  # fmt: skip
MAKERS = {"zeros", "zeros_like", "empty", "empty_like", "ones", "full", "len", "size", "range", "list"}
RANKS = re.compile(r"world|n_?procs?\b|num_?(proc|gpu|rank|replica)|n_?gpus?\b|\bws\b|group_size")
MAX_DEPTH = 10


class Place(NamedTuple):
    """Where an expression stands: nothing behind `line` counts; `frames` are those around it, innermost first."""

    tree: ast.Module
    scope: ast.AST
    line: int
    frames: list[sites.Site]


def look(frames: list[sites.Site], op: str, position: int) -> dict[str, Any] | None:
    """{metric, how ("ratio" | "call" | "exp" | "root" | "name"), index (its place in what is given)}, or None."""
    tree = syntax.tree(frames[0][0]) if frames and frames[0][0] else None
    if tree is None:
        return None
    place = Place(tree, syntax.function_at(tree, frames[0][1]), frames[0][1], frames)
    given = next((g for call in calls(place, op) if (g := argument(call, position)) is not None), None)
    return None if given is None else _follow(given, place, "", 0)


def divided_by_ranks(site: sites.Site, op: str) -> bool:
    """What is reduced at this line is divided by the number of ranks behind it, in the same function."""
    tree = syntax.tree(site[0])
    if tree is None:
        return False
    place = Place(tree, syntax.function_at(tree, site[1]), site[1], [])
    names = {ast.unparse(g) for call in calls(place, op) if (g := argument(call, 0)) is not None}
    for node in syntax.own_nodes(place.scope):
        divided = syntax.division(node)
        if divided is None or (not isinstance(node, ast.Call) and getattr(node, "lineno", 0) < site[1]):
            continue
        above, below = divided
        if RANKS.search(ast.unparse(below).lower()) and ast.unparse(above).removesuffix(".item()") in names:
            return True
    return False


def look_for_pairs(frames: list[sites.Site], op: str, position: int) -> sites.Site | None:
    """The product `X @ Y.T` (or `cdist`) behind what is given, of all samples of a loop with all samples of the same loop, where nothing was
    gathered before: each sample meets those of its own rank only. `X.T @ Y` is a sum over samples."""
    tree = syntax.tree(frames[0][0]) if frames and frames[0][0] else None
    if tree is None:
        return None
    place = Place(tree, syntax.function_at(tree, frames[0][1]), frames[0][1], frames)
    given = next((g for call in calls(place, op) if (g := argument(call, position)) is not None), None)
    for node in _resolved(given, place, 8) if given is not None else ():
        both = sides(node)
        if both is None or not isinstance(node, ast.expr):
            continue
        lists = [_collected(side, place._replace(line=node.lineno - 1)) for side in both]
        if all(lists) and _filled_together(tree, set.union(*lists)) and not _gathers(place, node.lineno):
            return (frames[0][0], node.lineno, frames[0][2])
    return None


def sides(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """The factors of a product of all rows with all rows."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        left, right = node.left, node.right
    elif isinstance(node, ast.Call) and callee(node) in ("cdist", "mm", "matmul") and len(node.args) > 1:
        left, right = node.args[:2]
        if callee(node) == "cdist":
            return left, right
    else:
        return None
    turned = isinstance(right, ast.Attribute) and right.attr in ("T", "mT")
    turned = turned or (isinstance(right, ast.Call) and callee(right) in ("t", "transpose"))
    return (left, right) if turned else None


def _collected(side: ast.expr, place: Place) -> set[str]:
    """The lists that a factor is concatenated from."""
    cats = [n for n in _resolved(side, place, 5) if isinstance(n, ast.Call) and callee(n) in ("cat", "concat", "concatenate", "vstack") and n.args]
    return {ast.unparse(n.args[0]) for n in cats if isinstance(n.args[0], (ast.Name, ast.Attribute))}


def _filled_together(tree: ast.Module, lists: set[str]) -> bool:
    """All of them are appended to in one loop, or in one method that a loop calls."""
    for scope in (n for n in syntax.nodes(tree) if isinstance(n, (ast.For, *syntax.FUNCTIONS))):
        calls = [n.func for n in syntax.own_nodes(scope) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        if lists <= {ast.unparse(f.value) for f in calls if f.attr in ("append", "extend")}:
            return True
    return False


def _gathers(place: Place, line: int) -> bool:
    """Something is gathered from the other ranks in this function; `x.gather(1, index)` is none."""
    calls = [n for n in syntax.own_nodes(place.scope) if isinstance(n, ast.Call) and n.lineno <= line]
    return any("gather" in (name := callee(n)) and (name != "gather" or getattr(getattr(n.func, "value", None), "id", "") in ("dist", "")) for n in calls)


def calls(place: Place, name: str) -> Iterator[ast.Call]:
    for node in syntax.own_nodes(place.scope):
        if isinstance(node, ast.Call) and callee(node) == name and syntax.spans(node, place.line):
            yield node


def argument(call: ast.Call, position: int) -> ast.expr | None:
    named = [k.value for k in call.keywords if k.arg in ("tensor", "obj", "object", "input_tensor")]
    return named[0] if named else call.args[position] if len(call.args) > position else None


def callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _metric(*names: str) -> str:
    """The first of these names that is a metric's, shortened to it; "" where one says that it is a mean over samples."""
    lowered = [n.lower() for n in names if n]
    found = next((m.group(1) for n in lowered if (m := METRIC.search(n)) is not None), "")
    return "" if any(PER_SAMPLE.search(n) for n in lowered[:1]) else found


def _follow(node: ast.expr, place: Place, label: str, depth: int) -> dict[str, Any] | None:
    """`label`: the last name of a metric on the way."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(node, (ast.List, ast.Tuple)):
        each = ((i, _follow(e, place, "", depth + 1)) for i, e in enumerate(node.elts))
        return next((found | {"index": i} for i, found in each if found is not None), None)
    if isinstance(node, ast.Name):
        return _name(node, place, node.id if _known(node.id) or not label else label, depth)
    if isinstance(node, ast.IfExp):
        return _follow(node.body, place, label, depth + 1) or _follow(node.orelse, place, label, depth + 1)
    if isinstance(node, ast.BinOp):
        return _arithmetic(node, place, label, depth)
    if isinstance(node, ast.UnaryOp):
        return _follow(node.operand, place, label, depth + 1)
    return _call(node, place, label, depth) if isinstance(node, ast.Call) else None


def _known(name: str) -> bool:
    return bool(METRIC.search(name.lower()) or PER_SAMPLE.search(name.lower()))


def _arithmetic(node: ast.BinOp, place: Place, label: str, depth: int) -> dict[str, Any] | None:
    if isinstance(node.op, ast.Div):
        return _follow(node.left, place, label, depth + 1) if _plain(node.right) else _ratio(node, place, label)
    if isinstance(node.op, ast.Pow):
        return _of_mean("root", node.left, place, label) if isinstance(node.right, ast.Constant) and node.right.value == 0.5 else None
    if isinstance(node.left, ast.Constant):
        return _follow(node.right, place, label, depth + 1)
    return _follow(node.left, place, label, depth + 1) if isinstance(node.right, ast.Constant) else None  # a product with a count is a weight


def _plain(divisor: ast.expr) -> bool:
    """A constant, or the number of ranks."""
    text = ast.unparse(divisor).lower()
    return isinstance(divisor, ast.Constant) or text in ("world", "ws") or "world_size" in text or "num_proc" in text


def _name(node: ast.Name, place: Place, label: str, depth: int) -> dict[str, Any] | None:
    made = assigned(place, node.id)
    if made is None:
        return _from_caller(node.id, place, label, depth)
    if _accumulated(place, node.id, made.lineno):
        return None
    value, behind = made.value, place._replace(line=made.lineno - 1)
    at = position(made, node.id)
    if at >= 0 and isinstance(value, ast.Tuple) and at < len(value.elts):
        value, at = value.elts[at], -1
    found = _follow(value, behind, label, depth + 1) if at < 0 else _call(value, behind, label, depth + 1, at) if isinstance(value, ast.Call) else None
    metric = _metric(label)
    unknown = isinstance(value, ast.Call) and callee(value) not in THROUGH | MAKERS and metric and not BY_NAME.search(metric)
    return found or ({"metric": metric, "how": "name", "index": 0} if unknown else None)


def assigned(place: Place, name: str) -> ast.Assign | None:
    """The last assignment to a name of this scope, up to the line."""
    found = [n for n in syntax.own_nodes(place.scope) if isinstance(n, ast.Assign) and n.lineno <= place.line and name in _targets(n)]
    return max(found, key=lambda n: n.lineno, default=None)


def _targets(node: ast.Assign) -> list[str]:
    flat = [e for t in node.targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
    return [e.id for e in flat if isinstance(e, ast.Name)]


def position(node: ast.Assign, name: str) -> int:
    """Its place in `a, b = ...`; -1 where it is the only target."""
    one = node.targets[0]
    elements = one.elts if isinstance(one, (ast.Tuple, ast.List)) else []
    return next((i for i, e in enumerate(elements) if isinstance(e, ast.Name) and e.id == name), -1)


def _accumulated(place: Place, name: str, since: int) -> bool:
    added = [n for n in syntax.own_nodes(place.scope) if isinstance(n, ast.AugAssign) and isinstance(n.op, ast.Add)]
    return any(ast.unparse(n.target) == name and since <= n.lineno <= place.line for n in added)


def _from_caller(name: str, place: Place, label: str, depth: int) -> dict[str, Any] | None:
    """A parameter of the function: what its caller gave."""
    function, frames = place.scope, place.frames[1:]
    if not isinstance(function, syntax.FUNCTIONS) or not frames:
        return None
    names = [a.arg for a in function.args.args]
    tree = syntax.tree(frames[0][0])
    if name not in names or tree is None:
        return None
    caller = Place(tree, syntax.function_at(tree, frames[0][1]), frames[0][1], frames)
    for call in calls(caller, function.name):
        at = names.index(name) - (names[0] in ("self", "cls"))
        named = next((k.value for k in call.keywords if k.arg == name), None)
        given = named or (call.args[at] if 0 <= at < len(call.args) else None)
        if given is not None:
            return _follow(given, caller, label, depth + 1)
    return None


def _call(node: ast.Call, place: Place, label: str, depth: int, at: int = -1) -> dict[str, Any] | None:
    name = callee(node)
    method = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in MODULES
    own = next((f for f in syntax.functions(place.tree) if f.name == name), None)
    if own is not None:
        return _returned(own, place, label if _metric(label) else name, depth, at)
    if name.endswith(CALLS) and not PER_SAMPLE.search(label.lower()):
        return {"metric": _metric(label) or _metric(name) or name, "how": "call", "index": 0}
    inner = node.func.value if method and isinstance(node.func, ast.Attribute) else node.args[0] if node.args else None
    if inner is None:
        return None
    if name in ("exp", "sqrt"):
        return _of_mean("exp" if name == "exp" else "root", inner, place, label)
    if name in ("div", "true_divide", "divide"):
        other = node.args[0 if method else 1] if len(node.args) > (not method) else None
        return None if other is None else _arithmetic(ast.BinOp(inner, ast.Div(), other), place, label, depth)
    return _follow(inner, place, label, depth + 1) if name in THROUGH else None


def _returned(function: ast.FunctionDef | ast.AsyncFunctionDef, place: Place, label: str, depth: int, at: int) -> dict[str, Any] | None:
    """What a function of the user's returns, the `at`-th of a tuple."""
    for node in syntax.own_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            value = node.value.elts[at] if at >= 0 and isinstance(node.value, ast.Tuple) and at < len(node.value.elts) else node.value
            found = _follow(value, Place(place.tree, function, node.lineno, []), label, depth + 1)
            if found is not None:
                return found
    return None


def _of_mean(how: str, inner: ast.expr, place: Place, label: str) -> dict[str, Any] | None:
    """exp() or a root of a mean loss or error, not one of a tensor of scores."""
    names = " ".join(_resolved_names(inner, place, 3)).lower()
    wanted = "loss|nll|entropy|(^| )ce( |$)|bits" if how == "exp" else "mse|sse|squared|(^| )sq|err"
    metric = _metric(label)
    if "loss" in label.lower() or not (metric in ("perplexity", "ppl", "rmse") or re.search(wanted, names)):
        return None
    return {"metric": metric or ("perplexity" if how == "exp" else "rmse"), "how": how, "index": 0}


def _ratio(node: ast.BinOp, place: Place, label: str) -> dict[str, Any] | None:
    """A quotient by what depends on the data. A quotient by a number of samples is a mean."""
    below = list(_resolved(node.right, place, 5))
    sums = [n for n in below if isinstance(n, ast.Call) and callee(n) in SUMS]
    counts = {"tp", "fp", "fn"} & {n.id.lower() for n in below if isinstance(n, ast.Name)}
    metric = _metric(label, getattr(place.scope, "name", "")) or ("f1" if len(counts) > 1 and not PER_SAMPLE.search(label.lower()) else "")
    if not metric or not (sums or len(counts) > 1) or _each_sample(sums):
        return None
    return {"metric": metric, "how": "ratio", "index": 0}


def _each_sample(sums: list[ast.Call]) -> bool:
    """The sums run over all but the first dimension: one quotient a sample, whose mean is a mean over samples."""
    if any(callee(n) in ("diag", "diagonal", "bincount") for n in sums):
        return False
    dims = [a for n in sums for a in (*n.args[-1:], *(k.value for k in n.keywords if k.arg in ("dim", "axis")))]
    found = [v for d in dims for v in (_numbers(d))]
    return bool(found) and 0 not in found


def _numbers(node: ast.expr) -> list[int]:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return []
    return [v for v in (value if isinstance(value, (tuple, list)) else [value]) if type(v) is int]


def _resolved(node: ast.expr, place: Place, depth: int) -> Iterator[ast.AST]:
    """The nodes of an expression, and of those that its names were assigned, or were added up from."""
    for inner in ast.walk(node):
        yield inner
        if not isinstance(inner, ast.Name) or not depth:
            continue
        made = assigned(place, inner.id)
        if made is not None and node is not made.value:
            yield from _resolved(made.value, place._replace(line=made.lineno - 1), depth - 1)
        for one in syntax.own_nodes(place.scope):
            if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name) and one.target.id == inner.id and one.lineno <= place.line:
                yield from ast.walk(one.value)


def _resolved_names(node: ast.expr, place: Place, depth: int) -> Iterator[str]:
    return (n.id if isinstance(n, ast.Name) else n.attr for n in _resolved(node, place, depth) if isinstance(n, (ast.Name, ast.Attribute)))
