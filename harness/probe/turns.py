"""Whether what a statement sends in each turn of a loop is made of this turn alone, so that one message could carry what all turns make.

Read from the source, once a call site. "No" wherever the source leaves it open: a value that goes on from turn to turn (a state, an iterate, also
one that is changed in place), a loop that a result may end, a value that is not made of what the loop runs over, receivers that differ from turn to
turn. A state that is changed under one name and read under another is not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from . import inplace, sites, syntax, valuesources

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
Loop = ast.For | Comprehension
ENDS = (ast.Break, ast.Return, ast.Raise)
MAX_READS = 200
RECEIVERS = ("group", "dst", "src", "group_dst", "group_src")
TENSORS = {"all_gather": 2}  # the first arguments of a collective; then come receivers. 1 of any other
Given = tuple[ast.expr, int]  # a value, and the line of the statement that assigns it


def apart(stack: list[sites.Site], op: str) -> bool:
    """Of a call of `op`, or of a helper that makes it, in the innermost loop around it; frames innermost first."""
    file = stack[0][0] if stack else ""
    found = _loop_around(stack[0], op) if stack else None
    if found is None and len(stack) > 1 and stack[0][2].isidentifier():
        file = stack[1][0]
        found = _loop_around(stack[1], stack[0][2])
    if found is None:
        return False
    loop, call = found
    if isinstance(loop, ast.While) or any(isinstance(n, ENDS) for n in _in_turn(loop)):
        return False
    return not _receivers_differ(loop, call, op) and _made_of_the_turn(loop, call, _changed(loop, call, file))


def _receivers_differ(loop: Loop, call: ast.Call, op: str) -> bool:
    """What goes to a group or a rank of each turn's own fits into no common message."""
    to = [k.value for k in call.keywords if k.arg in RECEIVERS]
    if valuesources.callee(call) == op:
        to += call.args[TENSORS.get(op, 1) :]
    of_turn = {name for part in (*_targets(loop), *_turn(loop)) for name in _bound(part)}
    return any(_names_read(value) & of_turn for value in to)


def _changed(loop: Loop, call: ast.Call, file: str) -> set[str]:
    """In place, by other calls than the one that is asked about."""
    tree = syntax.tree(file)
    imported = inplace.imports(tree) if tree is not None else set()
    others = [n for n in _in_turn(loop) if n is not call and getattr(n, "value", None) is not call]
    return {path for n in others for path in inplace.changed(n, imported)}


def _loop_around(site: sites.Site, called: str) -> tuple[Loop | ast.While, ast.Call] | None:
    """(the innermost loop, the call in it); None where there is none, or several such calls share the line."""
    tree = syntax.tree(site[0])
    if tree is None:
        return None
    nodes = syntax.own_nodes(syntax.function_at(tree, site[1]))
    named = [n for n in nodes if isinstance(n, ast.Call) and syntax.spans(n, site[1]) and valuesources.callee(n) == called]
    calls = [n for n in named if not any(n is not outer and n in syntax.nodes(outer) for outer in named)]  # `mean(x.mean())` is one of `mean`
    if len(calls) != 1:
        return None
    loops = [n for n in nodes if isinstance(n, (ast.For, ast.While, *COMPREHENSIONS)) and any(calls[0] in syntax.nodes(part) for part in _turn(n))]
    return (max(loops, key=lambda n: (n.lineno, n.col_offset)), calls[0]) if loops else None


def _turn(loop: ast.AST) -> list[ast.AST]:
    """What runs once a turn."""
    if isinstance(loop, (ast.For, ast.While)):
        return [*loop.body]
    if isinstance(loop, ast.DictComp):
        return [loop.key, loop.value]
    return [loop.elt] if isinstance(loop, (ast.ListComp, ast.SetComp, ast.GeneratorExp)) else []


def _made_of_the_turn(loop: Loop, call: ast.Call, changed: set[str]) -> bool:
    """Goes back from the call to all that was assigned for it before, in the same turn: it has to come to the loop's own variable, and to nothing
    that another turn has left."""
    own = set().union(*(_bound(t) for t in _targets(loop)))
    written = changed | {path for n in _in_turn(loop) for path in _written(n)}
    todo: list[Given] = [(value, call.lineno) for value in (*call.args, *(k.value for k in call.keywords))]
    seen: set[tuple[str, int]] = set()
    reached = False
    while todo:
        value, line = todo.pop()
        if any(_meet(path, other) for path in _attributes(value, own) for other in written) or any(_holds(o, changed) for o in _asked(value, own)):
            return False
        for name in _names_read(value):
            if (name, line) in seen:
                continue
            seen.add((name, line))
            given = _given(loop.body, name, line) if isinstance(loop, ast.For) else ([], False)
            if given is None or len(seen) > MAX_READS:
                return False
            todo.extend(given[0])
            if not given[1] and name in own:
                reached = True
            elif not given[1] and (given[0] or name in written):
                return False
    return reached


def _given(body: Sequence[ast.stmt], name: str, line: int) -> tuple[list[Given], bool] | None:
    """(what this turn assigns to a name before a line, whether it surely does); None where that is not to be said."""
    values: list[Given] = []
    surely = False
    for statement in body:
        if statement.lineno >= line:
            break
        found = _given_by(statement, name, line)
        if found is None:
            return None
        values = found[0] if found[1] else values + found[0]
        surely = surely or found[1]
    return values, surely


def _given_by(statement: ast.stmt, name: str, line: int) -> tuple[list[Given], bool] | None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, (ast.AnnAssign, ast.AugAssign)) else []
    if targets:
        value = statement.value  # type: ignore[attr-defined]
        if value is None or not any(name in _bound(t) for t in targets):
            return [], False
        return [(value, statement.lineno)], not isinstance(statement, ast.AugAssign)
    if isinstance(statement, ast.With) and not any(i.optional_vars is not None and name in _bound(i.optional_vars) for i in statement.items):
        return _given(statement.body, name, line)
    if isinstance(statement, ast.If):
        return _given_by_branches(statement, name, line)
    return None if name in _bound(statement) else ([], False)


def _given_by_branches(statement: ast.If, name: str, line: int) -> tuple[list[Given], bool] | None:
    for branch in (statement.body, statement.orelse):
        if branch and branch[0].lineno <= line <= (branch[-1].end_lineno or line):
            return _given(branch, name, line)
    first, second = _given(statement.body, name, line), _given(statement.orelse, name, line)
    return None if first is None or second is None else (first[0] + second[0], first[1] and second[1])


def _targets(loop: Loop) -> list[ast.expr]:
    return [loop.target] if isinstance(loop, ast.For) else [g.target for g in loop.generators]


def _own(node: ast.AST) -> tuple[ast.AST, ...]:
    return (node, *syntax.own_nodes(node))


def _in_turn(loop: Loop) -> Iterator[ast.AST]:
    for part in _turn(loop):
        yield from _own(part)


def _bound(target: ast.AST) -> set[str]:
    return {n.id for n in syntax.nodes(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _written(node: ast.AST) -> Iterator[str]:
    """The name, attribute or container that is assigned to."""
    if not isinstance(getattr(node, "ctx", None), ast.Store):
        return
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        yield ast.unparse(node)


def _names_read(value: ast.AST) -> set[str]:
    inner = {name for n in syntax.nodes(value) if isinstance(n, ast.comprehension) for name in _bound(n.target)}
    return {n.id for n in syntax.nodes(value) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - inner


def _attributes(value: ast.AST, own: set[str]) -> Iterator[str]:
    """Those that are read, but for what the loop's own variable has."""
    for node in syntax.nodes(value):
        if isinstance(node, ast.Attribute) and not {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} <= own:
            yield ast.unparse(node)


def _asked(value: ast.AST, own: set[str]) -> Iterator[str]:
    """Objects whose methods are called, and that are called themselves: what these read of the object is not said."""
    for node in syntax.nodes(value):
        if isinstance(node, ast.Call):
            held = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            if isinstance(held, (ast.Name, ast.Attribute)) and not _names_read(held) <= own:
                yield ast.unparse(held)


def _holds(path: str, changed: set[str]) -> bool:
    return any(other.startswith(f"{path}.") for other in changed)


def _meet(path: str, other: str) -> bool:
    return "." in other and (f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."))
