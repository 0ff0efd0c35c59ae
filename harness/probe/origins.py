"""Where in the user's source a thing was made, and how a loop can be left. Read in the rank, from source that is on its disk anyway.

A finding must point at the statement to be edited: that is rarely the loop in which the harm shows, but the line that made the sampler,
or the `if` that leaves the loop. Both are looked up once a call site (0.1-5 ms), never in a step.
"""

from __future__ import annotations

import ast
import linecache
import re
from types import FrameType
from typing import Any

from . import sites, syntax

_arguments: dict[tuple[str, int, str], list[sites.Site]] = {}


def argument(frame: FrameType | None, keyword: str, position: int, callee: str = "DataLoader") -> list[sites.Site]:
    """The lines that made the value of an argument of the call that `frame` is in: its assignment (or the argument itself where it is
    written out), then the assignments of what went into that, nearest first, at most six.

    Read from the source, not from the frame's variables: looking at those would keep them alive; empty where the source does not tell.
    """
    frame = sites.user_frame(frame)
    if frame is None:
        return []
    key = (frame.f_code.co_filename, frame.f_lineno, keyword)
    if key not in _arguments:
        tree = syntax.tree(frame.f_code.co_filename)
        lines = _argument_lines(tree, frame.f_lineno, keyword, position, callee) if tree is not None else []
        _arguments[key] = [(frame.f_code.co_filename, line, frame.f_code.co_name) for line in lines]
    return _arguments[key]


def _argument_lines(tree: ast.Module, line: int, keyword: str, position: int, callee: str) -> list[int]:
    scope = syntax.function_at(tree, line)
    calls = [
        n
        for n in syntax.nodes(scope)
        if isinstance(n, ast.Call) and n.lineno <= line <= (n.end_lineno or n.lineno) and _callee(n).endswith(callee)
    ]
    if not calls:
        return []
    call = max(calls, key=lambda n: n.lineno)
    given = next((k.value for k in call.keywords if k.arg == keyword), None)
    if given is None and 0 <= position < len(call.args) and not any(isinstance(a, ast.Starred) for a in call.args):
        given = call.args[position]
    found: list[int] = []
    if given is not None and not isinstance(given, (ast.Name, ast.Attribute)):
        found.append(given.lineno)
    todo: list[ast.expr] = _names(given)
    while todo and len(found) < 6:
        wanted = todo.pop(0)
        made = _assigned(scope, wanted, line) or (_assigned(tree, wanted, line) if isinstance(wanted, ast.Name) else None)
        if made is not None and made.lineno not in found:
            found.append(made.lineno)
            todo.extend(_names(getattr(made, "value", None)))
    return found


def advanced_at(site: sites.Site) -> sites.Site:
    """For a call that is given a batch: the statement that moves on to the next one (`position += ...`, here or in the method that hands out
    batches), else the one that made the batch, else the call."""
    tree = syntax.tree(site[0])
    if tree is None:
        return site
    scope = syntax.function_at(tree, site[1])
    calls = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.Call) and n.lineno <= site[1] <= (n.end_lineno or n.lineno)]
    given = [a for call in calls for a in call.args if isinstance(a, ast.Name)]
    made = [m for a in given if (m := _assigned(scope, a, site[1] - 1)) is not None]
    if not made:
        return site
    nearest = max(made, key=lambda n: n.lineno)
    value = getattr(nearest, "value", None)
    moved = _moved_on(tree, scope, value)
    return (site[0], moved or nearest.lineno, site[2])


def _moved_on(tree: ast.Module, scope: ast.AST, value: ast.expr | None) -> int:
    """The line of the `+=` that a slice of this scope, or a method called for the batch, goes by; 0: none."""
    where: list[ast.AST] = []
    if isinstance(value, ast.Call):
        where = [n for n in syntax.nodes(tree) if isinstance(n, ast.FunctionDef) and n.name == _callee(value)]
    names = {ast.unparse(n) for n in ast.walk(value) if isinstance(n, (ast.Name, ast.Attribute))} if value is not None else set()
    for body in where or [scope]:
        for node in syntax.own_nodes(body):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and (where or ast.unparse(node.target) in names):
                return node.lineno
    return 0


def _names(expression: ast.expr | None) -> list[ast.expr]:
    """The names and attributes that an expression reads, outermost first."""
    if isinstance(expression, (ast.Name, ast.Attribute)):
        return [expression]
    return [n for n in ast.walk(expression) if isinstance(n, ast.Name)] if expression is not None else []


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _assigned(scope: ast.AST, wanted: ast.expr, before: int) -> ast.stmt | ast.expr | None:
    """The last assignment of this scope, up to a line, to the same name or attribute."""
    if not isinstance(wanted, (ast.Name, ast.Attribute)):
        return None
    text = ast.unparse(wanted)
    found: ast.stmt | ast.expr | None = None
    for node in syntax.own_nodes(scope):
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) or node.lineno > before:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        flat = [e for t in targets for e in (t.elts if isinstance(t, (ast.Tuple, ast.List)) else [t])]
        if any(isinstance(t, type(wanted)) and ast.unparse(t) == text for t in flat) and (found is None or node.lineno > found.lineno):
            found = node
    return found


def attribute_line(kind: type, attribute: str) -> sites.Site | None:
    """The line in a class of the user's that assigns `self.<attribute>` first."""
    for base in kind.__mro__:
        code = getattr(vars(base).get("__init__"), "__code__", None)
        if code is None or not sites.is_user_code(code):
            continue
        for line in range(code.co_firstlineno, code.co_firstlineno + 200):
            text = linecache.getline(code.co_filename, line)
            if re.search(rf"\bself\.{re.escape(attribute)}\b(\s*:[^=]+)?\s*(,[^=]*)?=[^=]", text):
                return (code.co_filename, line, code.co_name)
    return None


def worker_line(kind: type) -> sites.Site | None:
    """Where a stream of the user's class deals with its worker, or else where it starts to iterate."""
    for base in kind.__mro__:
        codes = [c for f in vars(base).values() if (c := getattr(f, "__code__", None)) is not None and sites.is_user_code(c)]
        for code in codes:
            for line in range(code.co_firstlineno, max((at for _, _, at in code.co_lines() if at), default=0) + 1):
                if re.search(r"\bworker\w*\s*=|get_worker_info", linecache.getline(code.co_filename, line)):
                    return (code.co_filename, line, code.co_name)
        first = next((c for c in codes if c.co_name == "__iter__"), None)
        if first is not None:
            return (first.co_filename, first.co_firstlineno, first.co_name)
    return None


def seeding_line(function: Any) -> sites.Site | None:
    """The line of a worker_init_fn that seeds a generator, or else its first."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    if code is None or not sites.is_user_code(code):
        return None
    lines = sorted({at for _, _, at in code.co_lines() if at})
    line = next((at for at in lines if re.search(r"seed\w*\(", linecache.getline(code.co_filename, at)) and at > code.co_firstlineno), code.co_firstlineno)
    return (code.co_filename, line, code.co_name)


def loops(frames: list[sites.Site]) -> dict[str, Any]:
    """The loops around these frames, innermost first: `ranges` of lines, and `exits`, the statements that can end them (`continue`s are
    listed too).

    Level 0 is the loop that the first frame's line belongs to (its header or its body), 1 the loop around it, and so on outwards.
    """
    ranges: list[dict[str, Any]] = []
    exits: list[dict[str, Any]] = []
    for file, line, function in frames:
        tree = syntax.tree(file)
        if tree is None:
            break
        for loop in loops_around(tree, line):
            level = len(ranges)
            ranges.append({"file": file, "func": function, "first": loop.lineno, "last": loop.end_lineno or loop.lineno, "level": level})
            exits.extend({"site": sites.as_json((file, at, function)), "level": level, "kind": kind} for at, kind in _ways_out(loop))
        if len(ranges) > 4:
            break
    return {"exits": exits[:40], "ranges": ranges, "result": sites.as_json(result_after(frames[0]) or sites.UNKNOWN) if frames else None}


def of_loader(loader: Any, frame: FrameType, made: sites.Site) -> dict[str, Any]:
    """Where a data loader, and what it was given, was made; `frame` is its constructor's."""
    dataset = argument(frame, "dataset", 0)
    sampler = argument(frame, "batch_sampler", 4) or argument(frame, "sampler", 3)
    generator = argument(frame, "generator", -1)
    lasting = argument(frame, "persistent_workers", -1)
    return {
        "made": sites.as_json(made),
        "made_sampler": sites.as_json(sampler[0]) if sampler else None,
        "made_dataset": [sites.as_json(s) for s in dataset],
        "made_generator": sites.as_json(generator[0]) if generator else None,
        "made_lasting": sites.as_json(lasting[0]) if lasting else None,
        "seeds_workers": sites.as_json(seeding_line(getattr(loader, "worker_init_fn", None)) or sites.UNKNOWN),
    }


_headers: dict[sites.Site, str] = {}


def loop_header(site: sites.Site) -> str:
    """The first line of the innermost loop around a call; "" where it stands in none."""
    if site not in _headers:
        tree = syntax.tree(site[0]) if site[0] else None
        around = loops_around(tree, site[1]) if tree is not None else []
        _headers[site] = linecache.getline(site[0], around[0].lineno).strip()[:200] if around else ""
    return _headers[site]


def result_after(site: sites.Site) -> sites.Site | None:
    """The statement behind a loop, or behind a line that heads none, that makes numbers of what was summed: divides it, or reads it."""
    tree = syntax.tree(site[0])
    if tree is None:
        return None
    scope, line = syntax.function_at(tree, site[1]), site[1]
    around = loops_around(tree, line)
    end = (around[0].end_lineno or line) if around and around[0].lineno == line else line
    last = (around[1].end_lineno if len(around) > 1 else None) or getattr(scope, "end_lineno", None) or 1 << 30
    kinds = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
    behind = sorted((n for n in syntax.own_nodes(scope) if isinstance(n, kinds) and end < n.lineno <= last), key=lambda n: n.lineno)
    found = next((n for n in behind if n.value is not None and _makes_number(n)), None)
    return (site[0], found.lineno, site[2]) if found is not None else None


def joined_after(site: sites.Site) -> sites.Site | None:
    """The first statement of the function, at or behind a line, that concatenates."""
    tree = syntax.tree(site[0])
    if tree is None:
        return None
    own = syntax.own_nodes(syntax.function_at(tree, site[1]))
    lines = [n.lineno for n in own if isinstance(n, ast.Call) and _callee(n) in ("cat", "concat", "concatenate", "hstack", "chain") and n.lineno >= site[1]]
    return (site[0], min(lines), site[2]) if lines else None


def epoch_origin(frames: list[sites.Site]) -> sites.Site | None:
    """Where the numbers given to set_epoch come from: the caller, if the loop around the call runs over a parameter of its function."""
    if len(frames) < 2:
        return None
    tree = syntax.tree(frames[0][0])
    scope = syntax.function_at(tree, frames[0][1]) if tree is not None else None
    if tree is None or not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    given = {a.arg for a in (*scope.args.args, *scope.args.kwonlyargs)}
    for loop in loops_around(tree, frames[0][1]):
        if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Name) and loop.iter.id in given:
            return frames[1]
    return None


def _makes_number(statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.Div) or (isinstance(node, ast.Attribute) and node.attr in ("item", "tolist", "mean")) for node in ast.walk(statement)
    )


def loops_around(tree: ast.Module, line: int) -> list[ast.For | ast.While]:
    """Loops of the innermost function at `line` that contain it, innermost first."""
    scope = syntax.function_at(tree, line)
    loops = [n for n in syntax.own_nodes(scope) if isinstance(n, (ast.For, ast.While)) and n.lineno <= line <= (n.end_lineno or n.lineno)]
    return sorted(loops, key=lambda n: -n.lineno)


def _ways_out(loop: ast.For | ast.While) -> list[tuple[int, str]]:
    """(line, kind) of the conditions that end this loop or a turn of it: its own `break`s and `continue`s, `return`s, a while's
    condition."""
    found: list[tuple[int, str]] = []
    if isinstance(loop, ast.While) and not (isinstance(loop.test, ast.Constant) and loop.test.value):
        found.append((loop.lineno, "while"))
    todo: list[tuple[ast.AST, int, bool]] = [(n, 0, True) for n in loop.body]
    while todo:
        node, condition, own = todo.pop(0)
        if isinstance(node, (ast.Break, ast.Continue)) and own:
            found.append((condition or node.lineno, type(node).__name__.lower()))
        elif isinstance(node, ast.Return):
            found.append((condition or node.lineno, "return"))
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            inner = node.lineno if isinstance(node, ast.If) else condition
            still = own and not isinstance(node, (ast.For, ast.While))
            todo.extend((child, inner, still) for child in ast.iter_child_nodes(node))
    return sorted(set(found))
