"""Loops over the parameters of a wrapper (DDP, DataParallel, torch.compile) that compare names with texts which fit the names without its prefix.

Event "wrapped_names" (first MAX_TOLD, when an optimizer of these parameters takes its first step): site (the test), loop (the call of
named_parameters()), given_at (where the wrapper was handed to the function that loops, if it is a parameter of it), prefix, test (the expression),
fits (of the bare names, how many it tells from the others), num, wrapper (its class), opt, effect: "group" (the optimizer has a group without
parameters) | "rates" (all its groups are alike) | "freeze" (nothing is frozen) | "".
"""

from __future__ import annotations

import ast
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import Any

from .. import nametests, sites, syntax, variables
from ..arm import on_import
from ..patching import quiet, wrap
from ..state import S
from . import steps

MAX_TOLD, MAX_NAMES, MAX_LOOKED_AT, MAX_LOOKS = 4, 400, 32, 16
WRAPPERS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
SPARED = ("module", "_orig_mod")  # a function that names the prefix knows of it


@dataclass
class Found:
    """A test that is blind to the names that it is given."""

    model: weakref.ref[Any]
    at: sites.Site
    loop: sites.Site
    given_at: sites.Site | None
    test: str
    fits: int
    num: int
    prefix: str
    groups: bool  # the function makes groups of an optimizer
    freezes: bool
    looks: int = 0


_found: list[Found] = []
_told = [0]
_looked: set[tuple[int, int]] = set()


def _named_parameters(original: Any) -> Any:
    note = quiet(_note)

    def named_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if not S.light and len(_looked) < MAX_LOOKED_AT and not args and not kwargs and sites.is_user_code(frame.f_code):
            note(self, frame)
        return original(self, *args, **kwargs)

    return named_parameters


def _note(model: Any, frame: FrameType) -> None:
    key, at = (id(frame.f_code), frame.f_lasti), sites.of_frame(frame)
    tree = syntax.tree(at[0])
    if key in _looked or tree is None:
        return
    _looked.add(key)
    scope = syntax.function_at(tree, at[1])
    if any(isinstance(n, ast.Constant) and isinstance(n.value, str) and any(s in n.value for s in SPARED) for n in _spoken(scope)):
        return
    prefix, bare = _bare(model)
    held = frame.f_locals
    try:
        _search(model, frame, tree, scope, at, bare, prefix, held)
    finally:
        variables.let_go(frame, held)


def _bare(model: Any) -> tuple[str, list[str]]:
    """What all wrappers put in front of the names, and the names without it."""
    prefix = ""
    while (attribute := WRAPPERS.get(type(model).__name__)) is not None:
        prefix, model = f"{prefix}{attribute}.", getattr(model, attribute)
    return prefix, [n for n, _ in model.named_parameters()][:MAX_NAMES]


def _spoken(scope: syntax.Function) -> list[ast.AST]:
    """All of a function but its docstring."""
    documented = {id(n.value) for n in syntax.nodes(scope) if isinstance(n, ast.Expr)}
    return [n for n in syntax.nodes(scope) if id(n) not in documented]


def _search(
    model: Any, frame: FrameType, tree: ast.Module, scope: syntax.Function, at: sites.Site, bare: list[str], prefix: str, held: dict[str, Any]
) -> None:
    def lookup(name: str) -> Any:
        found = held if name in held else frame.f_globals
        if name not in found:
            raise nametests.Unknown
        return found[name]

    given = [prefix + n for n in bare]
    for loop in nametests.loops(tree, at[1]):
        test = nametests.blind(loop, given, bare, lookup) if len(bare) > 1 else None
        if test is None:
            continue
        values = Counter(repr(loop.value(test, n, lookup)) for n in bare)
        usual = repr(loop.value(test, given[0], lookup))
        code = frame.f_code
        caller = sites.user_frame(frame.f_back) if nametests.receiver(tree, at[1]) in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] else None
        spoken = syntax.nodes(scope)
        _found.append(Found(
            weakref.ref(model), (at[0], test.lineno, at[2]), at, sites.of_frame(caller) if caller is not None else None, nametests.spelt(loop, test),
            len(bare) - values[usual], len(bare), prefix,
            any(isinstance(n, ast.Constant) and n.value == "params" for n in spoken),
            any(isinstance(n, ast.Attribute) and (n.attr, type(n.ctx)) in (("requires_grad", ast.Store), ("requires_grad_", ast.Load)) for n in loop.nodes),
        ))  # fmt: skip


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    """Told with the first optimizer of these parameters that takes its first step behind the loop: it may have been made from what the loop chose."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]} if not witness.began else set()
    for found in list(_found):
        model = found.model()
        found.looks += 1
        if model is None or found.looks > MAX_LOOKS:
            _found.remove(found)
        elif any(id(p) in held for p in model.parameters()):
            _found.remove(found)
            _tell(found, optimizer, witness, model)


def _tell(found: Found, optimizer: Any, witness: Any, model: Any) -> None:
    _told[0] += 1
    if _told[0] <= MAX_TOLD:
        S.recorder.event(
            "wrapped_names", found.at, loop=sites.as_json(found.loop), given_at=sites.as_json(found.given_at) if found.given_at else None,
            prefix=found.prefix, test=found.test, fits=found.fits, num=found.num, wrapper=type(model).__name__, effect=_effect(found, optimizer, model),
            opt=witness.opt,
        )  # fmt: skip


def _effect(found: Found, optimizer: Any, model: Any) -> str:
    groups = optimizer.param_groups
    if any(not group["params"] for group in groups):
        return "group"
    alike = {repr(sorted((k, v) for k, v in g.items() if isinstance(v, (int, float, str, bool, tuple)))) for g in groups}
    if found.groups and len(groups) > 1 and len(alike) == 1:
        return "rates"
    return "freeze" if found.freezes and all(p.requires_grad for p in model.parameters()) else ""


def _arm_compiled(eval_frame: Any) -> None:
    wrap(eval_frame.OptimizedModule, "named_parameters", _named_parameters)


def arm() -> None:
    import torch

    for kind in (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel):
        wrap(kind, "named_parameters", _named_parameters)
    on_import("torch._dynamo.eval_frame", quiet(_arm_compiled))
    steps.at_step.append(_at_step, when=_found)
