"""Numbers in shared memory (`multiprocessing.Value`) that a process reads and writes back without their lock.

`value += 1` is a read under the lock and a write under the lock, and between them another process may have written.
Event "unlocked_add" (at the 2nd, 4th, 8th, ... write of a statement; 40 in all): site, lock (name of the value's lock and where the value lies, the
same in all processes; several values may have one lock), num. Only where the source reads and writes the same value in one statement, and neither
the value's lock nor anything else that could be a lock is held: no `with`, no `acquire()` around it in the functions that the call came through.
"""

from __future__ import annotations

import ast
import sys
from types import FrameType, ModuleType
from typing import Any

from .. import sites, syntax
from ..arm import on_import
from ..patching import quiet
from ..state import S

MAX_EVENTS, MAX_FRAMES = 40, 8
NO_LOCKS = ("no_grad", "enable_grad", "inference_mode", "autocast", "open(", "record_function", "profile", "suppress", "tqdm", "device(")
_counts: dict[tuple[sites.Site, str], int] = {}
_num = [0]


@quiet
def _note(value: Any, frame: FrameType) -> None:
    user = sites.user_frame(frame)
    if user is None or _num[0] >= MAX_EVENTS:
        return
    site, lock = sites.of_frame(user), f"{value._lock._semlock.name} {_place(value)}"
    count = _counts[(site, lock)] = _counts.get((site, lock), 0) + 1
    if count < 2 or count & (count - 1) or not reads_and_writes(site[0], site[1]) or _may_be_held(user):
        return
    _num[0] += 1
    S.recorder.event("unlocked_add", site, lock=lock, num=count)


def _place(value: Any) -> int:
    """Where it begins in the shared memory that multiprocessing cuts into pieces."""
    wrapper = getattr(value.get_obj(), "_wrapper", None)
    return int(wrapper._state[0][1]) if wrapper is not None else 0


def reads_and_writes(file: str, line: int) -> bool:
    """`x.value += n`, or `x.value = x.value + n`."""
    tree = syntax.tree(file)
    for node in syntax.nodes(tree) if tree is not None else ():
        if isinstance(node, ast.AugAssign) and syntax.spans(node, line) and _is_value(node.target):
            return True
        if isinstance(node, ast.Assign) and syntax.spans(node, line):
            written = {ast.unparse(t) for t in node.targets if _is_value(t)}
            if written & {ast.unparse(n) for n in ast.walk(node.value) if _is_value(n)}:
                return True
    return False


def _is_value(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "value"


def _may_be_held(user: FrameType | None) -> bool:
    for _ in range(MAX_FRAMES):
        if user is None:
            return False
        if may_hold_a_lock(user.f_code.co_filename, user.f_lineno):
            return True
        user = sites.user_frame(user.f_back)
    return False


def may_hold_a_lock(file: str, line: int) -> bool:
    """A `with` around this line, or an `acquire()` in its function, that may be a lock's, or processes that may take turns; also where there is no
    source to tell."""
    tree = syntax.tree(file)
    if tree is None:
        return True
    own = syntax.own_nodes(syntax.function_at(tree, line))
    if any(isinstance(n, ast.Attribute) and n.attr in ("acquire", "enter_context") for n in own) or _may_take_turns(own, line):
        return True
    items = [i for n in own if isinstance(n, (ast.With, ast.AsyncWith)) and n.lineno <= line <= (n.end_lineno or 0) for i in n.items]
    return any(not any(word in ast.unparse(i.context_expr) for word in NO_LOCKS) for i in items)


def _may_take_turns(own: tuple[ast.AST, ...], line: int) -> bool:
    """In a loop with a `wait()`, a barrier's say, the line stands under a condition that may be one process's at a time; or a loop that only waits
    stands in the function. Under no condition all of them write between two barriers."""
    around = [n for n in own if isinstance(n, (ast.For, ast.While, ast.If)) and syntax.spans(n, line)]
    conditions = [n for n in around if isinstance(n, ast.If)]
    for loop in around:
        inside = [c for c in conditions if c.lineno > loop.lineno]
        if not isinstance(loop, ast.If) and inside and any(isinstance(n, ast.Attribute) and n.attr == "wait" for n in syntax.nodes(loop)):
            return True
    return any(isinstance(n, ast.While) and not syntax.spans(n, line) and all(_only_waits(s) for s in n.body) for n in own)


def _only_waits(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    name = (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")) if isinstance(call, ast.Call) else ""
    return isinstance(statement, ast.Pass) or name in ("sleep", "wait", "sched_yield")


def _watch(module: ModuleType) -> None:
    """Every `Value` of a plain number is of this class; its property takes the lock for one access."""
    kind: Any = module.Synchronized
    plain = kind.value

    def write(self: Any, value: Any) -> None:
        lock = getattr(self._lock, "_semlock", None)
        if lock is not None and not S.recorder.disabled and not lock._is_mine():
            _note(self, sys._getframe(1))
        plain.fset(self, value)

    kind.value = property(plain.fget, write)


def arm() -> None:
    on_import("multiprocessing.sharedctypes", _watch)
