"""The statement that keeps a loss or an output with its graph, by reading the user's source: asked only when graphs pile up, about 10 ms
then.

Follows the value from `loss.backward()` (or from a forward) through assignments, calls of functions in the same file, what they return,
and forward hooks, until it is appended, summed or stored without `.item()`, `.detach()` or the like. Looks at no object of the user's:
before Python 3.13 reading another frame's locals would change what `locals()` returns to the script.
"""

from __future__ import annotations

import ast

from . import containers, cuts, syntax
from .sites import Site
from .syntax import Function

ADDS = {"append", "extend", "add", "insert", "put", "appendleft", "update", "setdefault", "push"}
ENDS = {"item", "detach", "tolist", "numpy", "data", "cpu_item", "size", "numel", "shape", "dim", "argmax", "backward"}
PLAIN = {"float", "int", "str", "len", "repr", "bool", "print", "round", "format", "isinstance", "isnan", "isfinite"}
HOOKS = {"register_forward_hook", "register_full_backward_hook", "register_forward_pre_hook", "register_hook"}
MAX_DEPTH = 3


def statement(site: Site) -> Site | None:
    """Where the value that `site` computes is kept with its graph; None where the source does not show it."""
    tree = syntax.tree(site[0]) if site[0] else None
    if tree is None:
        return None
    function = syntax.function_at(tree, site[1])
    if (sums := _sums_at(function, site[1])) is not None:
        return (site[0], sums.lineno, _title(function))
    seeds = _names_at(function, site[1])
    found = _kept(tree, function, _spread(function, seeds), MAX_DEPTH, set()) or _kept_by_hook(tree) or _kept_in_forward(site[0])
    return (site[0], found.lineno, _title(syntax.function_at(tree, found.lineno))) if found is not None else _kept_on_ctx()


def candidates(site: Site) -> list[Site]:
    """Statements in the loop around `site` that fill a container which no loop empties, numbers and texts left out."""
    tree = syntax.tree(site[0]) if site[0] else None
    if tree is None:
        return []
    loops = _loops_around(tree, site[1])
    emptied = {label for n in syntax.nodes(loops[0]) if isinstance(n, (ast.Assign, ast.AnnAssign)) for label in _targets(n)} if loops else set()
    for loop in reversed(loops):  # the innermost first: what is added a step counts before what is added an epoch
        calls = [(n, n.func) for n in syntax.nodes(loop) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
        emptied |= {_label(method.value) for _, method in calls if method.attr == "clear"}
        adding = [call for call, method in calls if method.attr in ADDS and _label(method.value) not in emptied]
        lines = {call.lineno for call in adding if any(_may_hold_tensor(argument) for argument in call.args)}
        if lines:
            return [(site[0], line, _title(syntax.function_at(tree, line))) for line in sorted(lines)]
    return _attributes()


def _attributes() -> list[Site]:
    """Statements in methods of the user's classes that fill a container of the object, in any file: a dataset's cache, a module's list."""
    files = cuts.user_files()
    found = [f for name in (files if len(files) <= cuts.MAX_FILES else ()) for f in containers.fillers(name)]
    return sorted({place for place, _, node in found if isinstance(node, ast.Assign) or any(_may_hold_tensor(a) for a in node.args)})


def _kept_in_forward(file: str) -> ast.stmt | ast.expr | None:
    """A forward that keeps what it computes in a container of the module."""
    for _, method, node in containers.fillers(file):
        parameters = {a.arg for a in method.args.args} - {"self"}
        if method.name == "forward" and _keeps(node, _spread(method, parameters)):
            return node
    return None


def _kept_on_ctx() -> Site | None:
    """`ctx.y = y` in a Function's forward that returns y: the graph's node holds the context, the context the output, the output its node."""
    files = cuts.user_files()
    trees = [(name, tree) for name in (files if len(files) <= cuts.MAX_FILES else ()) if (tree := syntax.tree(name)) is not None]
    for name, tree in trees:
        kinds = [n for n in syntax.nodes(tree) if isinstance(n, ast.ClassDef) and any(ast.unparse(b).endswith("Function") for b in n.bases)]
        for method in [m for kind in kinds for m in kind.body if isinstance(m, ast.FunctionDef) and m.name == "forward" and m.args.args]:
            line = _own_output(method)
            if line:
                return (name, line, method.name)
    return None


def _own_output(method: ast.FunctionDef) -> int:
    """The line of a forward that puts into an attribute of its context what it returns; 0: none."""
    nodes, ctx = syntax.own_nodes(method), method.args.args[0].arg
    given = {_label(part) for n in nodes if isinstance(n, ast.Return) and n.value is not None for part in _parts(n.value)} - {""}
    put = [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Attribute) and _label(n.targets[0].value) == ctx]
    return next((n.lineno for n in put if any(_label(part) in given for part in _parts(n.value))), 0)


def _parts(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]


def _loops_around(tree: ast.Module, line: int, depth: int = 2) -> list[ast.stmt]:
    """The loops that run this line, outermost first: in its function, else in a function that calls it."""
    function = syntax.function_at(tree, line)
    loops = [n for n in syntax.own_nodes(function) if isinstance(n, (ast.For, ast.While, ast.AsyncFor)) and n.lineno <= line <= (n.end_lineno or 0)]
    if loops or depth == 0 or isinstance(function, ast.Module):
        return sorted(loops, key=lambda n: n.lineno)
    for call in syntax.nodes(tree):
        if isinstance(call, ast.Call) and _called_name(call.func) == _title(function):
            found = _loops_around(tree, call.lineno, depth - 1)
            if found:
                return found
    return []


def _may_hold_tensor(node: ast.AST) -> bool:
    """Whether this argument is more than a number or a text."""
    if isinstance(node, (ast.Constant, ast.JoinedStr, ast.Compare)):
        return False
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else _label(node.func)
        return called not in PLAIN and called not in {"item", "tolist", "size", "numel", "dim", "time", "perf_counter", "format", "join"}
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(_may_hold_tensor(part) for part in node.elts)
    if isinstance(node, ast.Dict):
        return any(_may_hold_tensor(part) for part in node.values if part is not None)
    return True


def _sums_at(function: Function, line: int) -> ast.AugAssign | None:
    """`total += loss(model(x), y)`: the line itself keeps what it computes."""
    for node in syntax.own_nodes(function):
        if isinstance(node, ast.AugAssign) and node.lineno <= line <= (node.end_lineno or node.lineno):
            calls = {_label(part.func) for part in ast.walk(node.value) if isinstance(part, ast.Call)} - {""}
            return node if _carries(node.value, set(), frozenset(calls)) else None
    return None


def _title(function: Function) -> str:
    return getattr(function, "name", "<module>" if isinstance(function, ast.Module) else "<lambda>")


def _label(node: ast.AST) -> str:
    """ "loss" of `loss`, "self.loss" of `self.loss`; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return ""


def _names_at(function: Function, line: int) -> set[str]:
    """What the statement on this line computes from or assigns to."""
    found: set[str] = set()
    for node in syntax.own_nodes(function):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno) and not hasattr(node, "body"):
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                found.update(_targets(node))
            elif isinstance(node, ast.Expr):
                found.update(label for part in ast.walk(node) if (label := _label(part)))
            elif isinstance(node, ast.AugAssign):
                found.add(_label(node.target))
    return {name for name in found if name and not name.endswith(".backward")}


def _targets(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [label for target in targets for part in ast.walk(target) if (label := _label(part))]


def _spread(function: Function, seeds: set[str]) -> set[str]:
    """The names that hold the same graph: assigned from a seed, or what a seed was computed from by a call or an operation."""
    names = set(seeds)
    for _ in range(4):
        for node in syntax.own_nodes(function):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
                continue
            targets = set(_targets(node))
            if _carries(node.value, names):
                names |= targets
            elif targets & names and isinstance(node.value, (ast.Call, ast.BinOp)):
                used = {label for part in ast.walk(node.value) if (label := _label(part))}
                names |= {label for label in used if label in _computed(function)}
    return names


def _computed(function: Function) -> set[str]:
    """Names that this function assigns from a call or an operation inside a loop: outputs and losses rather than models and settings."""
    found: set[str] = set()
    for loop in syntax.own_nodes(function):
        if isinstance(loop, (ast.For, ast.While, ast.AsyncFor)):
            for node in syntax.nodes(loop):
                if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Call, ast.BinOp)):
                    found.update(_targets(node))
    return found


def _carries(node: ast.AST, names: set[str], calls: frozenset[str] = frozenset()) -> bool:
    """Whether this expression passes on a graph: it holds one of the names, or a call of one of the functions, not ended by
    .item() and the like."""
    if _label(node) in names:
        return True
    if isinstance(node, ast.Attribute):
        return node.attr not in ENDS and _carries(node.value, names, calls)
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else _label(node.func)
        if called in ENDS or called in PLAIN:
            return False
        if called in calls:
            return True
        inside = [*node.args, *(k.value for k in node.keywords)]
        inside += [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return any(_carries(part, names, calls) for part in inside)
    if isinstance(node, ast.Lambda):  # it runs later, whatever it then makes of the tensor: until then it holds it
        held = {label for part in ast.walk(node.body) if (label := _label(part))} - {a.arg for a in node.args.args}
        return bool(held & names) or any(_carries(part, names, calls) for part in node.args.defaults)
    if isinstance(node, (ast.JoinedStr, ast.Compare)):
        return False
    return any(_carries(part, names, calls) for part in ast.iter_child_nodes(node))


def _kept(tree: ast.Module, function: Function, names: set[str], depth: int, seen: set[int]) -> ast.stmt | ast.expr | None:
    """The first keeping statement in this function, else in what it calls or in what calls it."""
    if depth == 0 or id(function) in seen:
        return None
    seen.add(id(function))
    ordered = sorted((n for n in syntax.own_nodes(function) if hasattr(n, "lineno")), key=lambda n: n.lineno)
    for node in ordered:
        if isinstance(node, (ast.stmt, ast.expr)) and _keeps(node, names) and not _is_of_this_file(tree, node):
            return node
    return _kept_below(tree, ordered, names, depth, seen) or _kept_above(tree, function, names, depth, seen)


def _is_of_this_file(tree: ast.Module, node: ast.AST) -> bool:
    """`meter.update(loss)` where `update` is the user's own: the statement inside it is meant."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and bool(_defined(tree, node.func.attr))


def _keeps(node: ast.AST, names: set[str], calls: frozenset[str] = frozenset()) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ADDS:
        return any(_carries(part, names, calls) for part in [*node.args, *(k.value for k in node.keywords)])
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
        return _label(node.target) not in names and _carries(node.value, names, calls)
    if isinstance(node, ast.Assign):
        own = set(_targets(node))
        if any(isinstance(t, ast.Subscript) for t in node.targets):
            return _carries(node.value, names, calls)
        used = {label for part in ast.walk(node.value) if (label := _label(part))}
        return isinstance(node.value, (ast.BinOp, ast.Call, ast.List)) and bool(own & used) and _carries(node.value, names - own, calls)
    return False


def _kept_below(tree: ast.Module, nodes: list[ast.AST], names: set[str], depth: int, seen: set[int]) -> ast.stmt | ast.expr | None:
    """Functions of this file that are given the value."""
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        called = call.func.attr if isinstance(call.func, ast.Attribute) else _label(call.func)
        for target in _defined(tree, called):
            given = _given(call, target, names, _is_method(tree, target))
            if given:
                found = _kept(tree, target, _spread(target, given), depth - 1, seen)
                if found is not None:
                    return found
    return None


def _defined(tree: ast.Module, name: str) -> list[ast.FunctionDef]:
    return [n for n in syntax.nodes(tree) if isinstance(n, ast.FunctionDef) and n.name == name] if name else []


def _is_method(tree: ast.Module, function: ast.FunctionDef) -> bool:
    static = any(_label(d) == "staticmethod" for d in function.decorator_list)
    return not static and any(function in node.body for node in syntax.nodes(tree) if isinstance(node, ast.ClassDef))


def _given(call: ast.Call, target: ast.FunctionDef, names: set[str], method: bool) -> set[str]:
    """Parameters of `target` that this call fills with the value."""
    parameters = [a.arg for a in target.args.args][1 if method else 0 :]
    by_place = {p for p, a in zip(parameters, call.args, strict=False) if _carries(a, names)}
    return by_place | {str(k.arg) for k in call.keywords if k.arg and _carries(k.value, names)}


def _kept_above(tree: ast.Module, function: Function, names: set[str], depth: int, seen: set[int]) -> ast.stmt | ast.expr | None:
    """Callers that get the value as a result."""
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    returned = [n for n in syntax.own_nodes(function) if isinstance(n, ast.Return) and n.value is not None]
    if not any(_carries(n.value, names) for n in returned if n.value is not None):
        return None
    calls = frozenset({function.name})
    for caller in [tree, *(n for n in syntax.nodes(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n is not function)]:
        seeds: set[str] = set()
        for node in sorted((n for n in syntax.own_nodes(caller) if hasattr(n, "lineno")), key=lambda n: n.lineno):
            if isinstance(node, (ast.stmt, ast.expr)) and _keeps(node, set(), calls):
                return node
            if isinstance(node, ast.Assign) and _carries(node.value, set(), calls):
                seeds.update(_targets(node))
        found = _kept(tree, caller, _spread(caller, seeds), depth - 1, seen) if seeds else None
        if found is not None:
            return found
    return None


def _kept_by_hook(tree: ast.Module) -> ast.stmt | ast.expr | None:
    """A forward hook that appends what it sees."""
    for call in syntax.nodes(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in HOOKS and call.args):
            continue
        hook = call.args[0]
        targets: list[Function] = [hook] if isinstance(hook, ast.Lambda) else list(_defined(tree, _called_name(hook)))
        for target in targets:
            arguments = target.args.args if isinstance(target, (ast.FunctionDef, ast.Lambda)) else []
            names = {a.arg for a in arguments} - {"self", "module"}
            for node in ast.walk(target):
                if isinstance(node, (ast.stmt, ast.expr)) and _keeps(node, names):
                    return node
    return None


def _called_name(node: ast.AST) -> str:
    """The function behind a hook argument: `keep`, `self.keep`, `functools.partial(keep, ...)`, `make_hook(name)`."""
    if isinstance(node, ast.Call):
        partial = (node.func.attr if isinstance(node.func, ast.Attribute) else _label(node.func)) == "partial"
        return _called_name(node.args[0]) if partial and node.args else _called_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else _label(node)
