"""Whether what a schedule is given is better when it is higher or when it is lower, as the script names it: `sched.step(val_acc)`."""

from __future__ import annotations

import ast
import re
from functools import cache

from . import syntax, valuesources

HIGHER = {"acc", "accuracy", "auc", "auroc", "f1", "recall", "precision", "dice", "iou", "miou", "bleu"}  # a score or a map may be either
LOWER = {"loss", "losses", "err", "error", "perplexity", "ppl", "nll", "mse", "mae", "rmse", "wer", "cer"}
TURNED = {"neg", "negative", "negated", "minus", "inv", "inverse", "inverted"}
RIVALS = {"d", "g", "disc", "discriminator", "critic", "gen", "generator", "adv", "adversarial", "attack"}  # one that wins may be slowed down
SETS = re.compile(r"^(?:train|valid|val|test|eval|dev|mean|avg|best)(?=[a-z])")
WORD = re.compile(r"[A-Z]?[a-z]+\d*|[A-Z]+\d*(?![a-z])")
READERS = {"float", "round", "tensor", "as_tensor", "mean", "average", "get"}  # what they are given is what they give back


@cache
def better(file: str, line: int) -> str:
    """ "higher" | "lower", of the one value that the `.step(...)` at this line is given; "" where its name says neither, or both."""
    tree = syntax.tree(file) if file else None
    if tree is None:
        return ""
    calls = [n for n in syntax.nodes(tree) if isinstance(n, ast.Call) and syntax.spans(n, line) and valuesources.callee(n) == "step"]
    given = [*calls[0].args[:1], *(k.value for k in calls[0].keywords if k.arg == "metrics")] if len(calls) == 1 else []
    if len(given) != 1:
        return ""
    scope = syntax.function_at(tree, line)
    told = _told(given[0])
    named = {ast.unparse(n) for n in ast.walk(given[0]) if isinstance(n, (ast.Name, ast.Attribute, ast.Subscript))}
    made = [v for name in sorted(named) for v in valuesources.assigned(scope, name, own=True)] if told else []
    other_way = any(_told(v) not in ("", told) for v in made)
    return "" if other_way or any(_turned(v) for v in (given[0], *made)) else told


def _told(value: ast.expr) -> str:
    words = {w for name in _names(value) for w in _words(name)}
    if words & (TURNED | RIVALS) or bool(words & HIGHER) == bool(words & LOWER):
        return ""
    return "higher" if words & HIGHER else "lower"


def _names(value: ast.expr) -> list[str]:
    """What the value is called; not what a function that makes it is given."""
    if isinstance(value, ast.Name):
        return [value.id]
    if isinstance(value, ast.Attribute):
        return [value.attr, *_names(value.value)]
    if isinstance(value, ast.Constant):
        return [value.value] if isinstance(value.value, str) else []
    if isinstance(value, ast.Subscript):
        return _names(value.value) + _names(value.slice)
    if isinstance(value, ast.BinOp):
        return _names(value.left) + _names(value.right)
    if isinstance(value, ast.Call):
        reads = valuesources.callee(value) in READERS
        return [*_names(value.func), *(n for a in value.args if reads for n in _names(a))]
    return []


def _words(name: str) -> list[str]:
    bare = [SETS.sub("", word.lower()) for word in WORD.findall(name)]
    return [next((w for w in (b, b.rstrip("0123456789")) if w in HIGHER), b.rstrip("0123456789")) for b in bare]


def _turned(value: ast.expr) -> bool:
    """`-acc`, `1 - acc`, `1 / loss`: what is better is no longer what the name says."""
    return any(
        (isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub))
        or (isinstance(n, ast.BinOp) and (isinstance(n.op, ast.Sub) or (isinstance(n.op, ast.Div) and isinstance(n.left, ast.Constant))))
        for n in ast.walk(value)
    )
