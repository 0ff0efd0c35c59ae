"""What a file is written for: the numbers that the condition around torch.save compares.

Event "save_decided" (first 48 saves that stand below a comparison): site of the save, at (line of the condition), compared [[text, number], ...].
Read from the source and from the variables of the frames that the call came through; no property or method of the script's is called.
"""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

from .. import sites, syntax, variables
from ..patching import contained
from ..state import S
from . import saving

MAX_EVENTS, MAX_FRAMES = 48, 3
ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_num = [0]


def comparisons(file: str, line: int) -> tuple[int, list[ast.Name | ast.Attribute]]:
    """The innermost `if` around this line of its function that compares by size, itself or by a name that was given such a comparison:
    the line of the comparison, and the sides that are names or attributes."""
    tree = syntax.tree(file)
    own = syntax.own_nodes(syntax.function_at(tree, line)) if tree is not None else ()
    around = [n for n in own if isinstance(n, ast.If) and any(syntax.spans(statement, line) for statement in n.body)]
    for node in sorted(around, key=lambda n: -n.lineno):
        named = {n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)}
        given = [n.value for n in own if isinstance(n, ast.Assign) and n.lineno < node.lineno and any(_is_one_of(t, named) for t in n.targets)]
        for test in (node.test, *given):
            compared = [n for n in ast.walk(test) if isinstance(n, ast.Compare) and all(isinstance(op, ORDERED) for op in n.ops)]
            sides = [side for n in compared for side in (n.left, *n.comparators) if isinstance(side, (ast.Name, ast.Attribute))]
            if sides:
                return compared[0].lineno, sides
    return 0, []


def _is_one_of(target: ast.expr, names: set[str]) -> bool:
    return isinstance(target, ast.Name) and target.id in names


def _value(side: ast.Name | ast.Attribute, names: dict[str, Any]) -> float | None:
    """A plain number behind `name` or `name.attribute`, from what the objects themselves hold."""
    if isinstance(side, ast.Attribute):
        owner = names.get(side.value.id) if isinstance(side.value, ast.Name) else None
        held = getattr(owner, "__dict__", {}).get(side.attr)
    else:
        held = names.get(side.id)
    return float(held) if isinstance(held, (int, float)) and type(held) is not bool else None


def _look(frame: FrameType) -> tuple[int, list[list[Any]]]:
    at, sides = comparisons(frame.f_code.co_filename, frame.f_lineno)
    if not sides:
        return 0, []
    names = frame.f_locals
    found = [[ast.unparse(side), number] for side in sides if (number := _value(side, names)) is not None]
    variables.let_go(frame, names)
    return at, found


@contained
def _at_save(thing: Any, site: sites.Site, path: str) -> None:
    if _num[0] >= MAX_EVENTS:
        return
    frame = sites.user_frame(sys._getframe(1))
    for _ in range(MAX_FRAMES):
        if frame is None:
            return
        at, found = _look(frame)
        if found:
            _num[0] += 1
            S.recorder.event("save_decided", site, at=sites.as_json((frame.f_code.co_filename, at, frame.f_code.co_name)), compared=found)
            return
        frame = sites.user_frame(frame.f_back)


def arm() -> None:
    saving.at_save.append(_at_save)
