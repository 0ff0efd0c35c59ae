"""Whether what a reduction gives is read by nothing, while the numbers that went in are used on, as the source shows it.

`pair = torch.tensor([self.total, self.weight]); dist.all_reduce(pair); return self`: the sum over the ranks dies with its name. Told only where the
tensor holds copies, is made in this function, and its name stands there for nothing but the call. Constants, ranks and times carry nothing: a
reduction of these is a barrier, a warm-up or a benchmark.
"""

from __future__ import annotations

import ast

from . import nonlinear, sites, syntax, valuesources

Scope = ast.FunctionDef | ast.AsyncFunctionDef
REDUCTIONS = {"all_reduce", "reduce"}
OTHERS = ("gather", "broadcast", "all_to_all", "scatter", "isend", "irecv", "reduce_scatter", "all_reduce_coalesced")
COPIES = {"tensor", "stack", "cat"}
CONVERSIONS = {"to", "cuda", "cpu", "double", "float", "long", "contiguous", "clone", "detach"}
DYNAMIC = {"locals", "vars", "eval", "exec", "globals"}
DESCRIPTIONS = {"shape", "dtype", "device", "numel", "element_size", "nbytes", "size", "dim"}  # what a benchmark asks of a tensor it has sent
RESETS = {"__init__", "reset", "clear", "add", "update", "__repr__"}


def told(site: sites.Site, op: str) -> dict[str, object] | None:
    """The numbers that are used on, and the line of the first such use; None where the result may be read."""
    tree = syntax.tree(site[0]) if site[0] and op in REDUCTIONS else None
    scope = syntax.function_at(tree, site[1]) if tree is not None else None
    if tree is None or not isinstance(scope, syntax.FUNCTIONS) or _is_dynamic(scope):
        return None
    calls = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.Call) and valuesources.callee(n) == op and syntax.spans(n, site[1])]
    made = _made_for(calls[0], scope) if len(calls) == 1 else None
    if made is None or _exchanged_else(tree, scope):
        return None
    names = _sources(made, scope, tree)
    uses = [u for name in names if (u := _use(name, calls[0], scope, tree))]
    if not uses or any("rank" in name.lower() for name in names) or any(_is_written(name, calls[0], scope) for name in names):
        return None
    return {"names": names[:6], "used": sites.as_json((site[0], uses[0], ""))}


def _is_dynamic(scope: Scope) -> bool:
    """Names may be read by their text, or live on outside."""
    own = syntax.nodes(scope)
    return any(isinstance(n, (ast.Global, ast.Nonlocal)) or (isinstance(n, ast.Name) and n.id in DYNAMIC) for n in own)


def _made_for(call: ast.Call, scope: Scope) -> list[ast.expr] | None:
    """What the tensor given to this call is made of, where nothing reads it behind the call."""
    statement = any(isinstance(n, ast.Expr) and n.value is call for n in syntax.own_nodes(scope))
    given = nonlinear.argument(call, 0)
    if not statement or given is None:
        return None
    if isinstance(given, ast.Name):
        return _made_of_name(given, call, scope)
    parts = _copied(given)
    return [parts] if parts is not None else None


def _made_of_name(given: ast.Name, call: ast.Call, scope: Scope) -> list[ast.expr] | None:
    """Given once, converted and filled entry by entry before the call, and nothing more: any other place of the name may read the result."""
    before = [n for n in syntax.nodes(scope) if isinstance(n, ast.Assign) and len(n.targets) == 1 and n.lineno < call.lineno]
    values = [n.value for n in before if _is(n.targets[0], given.id)]
    filled = [(t.value, n.value) for n in before if isinstance(t := n.targets[0], ast.Subscript) and _is(t.value, given.id)]
    fresh = [v for v in values if not _is(_converted(v), given.id)]
    known = {id(given), *(id(owner) for owner, _ in filled), *(id(_converted(v)) for v in values if v not in fresh)}
    found = [n for n in syntax.nodes(scope) if isinstance(n, ast.Name) and n.id == given.id]
    read = any(isinstance(n.ctx, ast.Load) and id(n) not in known for n in found)
    if read or len(fresh) != 1 or sum(isinstance(n.ctx, ast.Store) for n in found) != len(values):
        return None
    made = _copied(fresh[0], blank=bool(filled))
    return [made, *(value for _, value in filled)] if made is not None else None


def _is(node: ast.expr | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _converted(value: ast.expr) -> ast.expr:
    """`x` of `x.to(device).double()`."""
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CONVERSIONS:
        value = value.func.value
    return value


def _copied(value: ast.expr, blank: bool = False) -> ast.expr | None:
    """What a new tensor, which shares memory with nothing, is made of; `blank`: it is filled later."""
    inner = _converted(value)
    if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and _is(inner.func.value, "torch") and inner.args:
        names = {*COPIES, *(("zeros", "empty") if blank else ())}
        listed = inner.func.attr == "as_tensor" and isinstance(inner.args[0], (ast.List, ast.Tuple))
        if (inner.func.attr in names or listed) and not any(k.arg == "out" for k in inner.keywords):
            return inner.args[0]
    while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in CONVERSIONS:
        if value.func.attr == "clone":
            return inner
        value = value.func.value
    return None


def _exchanged_else(tree: ast.Module, scope: Scope) -> bool:
    """The function, or another one of its class, has a collective whose result is read: the numbers may go to the other ranks that way."""
    owner = valuesources.owner_of(tree, scope.lineno)
    functions = [f for f in syntax.functions(tree) if f is scope or (owner is not None and f in syntax.nodes(owner))]
    for function in functions:
        for call in (n for n in syntax.own_nodes(function) if isinstance(n, ast.Call)):
            name = valuesources.callee(call)
            if any(w in name for w in OTHERS) or (name in REDUCTIONS and _made_for(call, function) is None):
                return True
    return False


def _sources(made: list[ast.expr], scope: Scope, tree: ast.Module) -> list[str]:
    """Names and attributes that an expression takes its numbers from; of a loop's variable also what the loop goes through."""
    modules = {(a.asname or a.name).partition(".")[0] for n in syntax.nodes(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    found = [c for value in made for c in _chains(value)]
    for loop in (n for n in syntax.nodes(scope) if isinstance(n, (ast.For, ast.comprehension))):
        targets = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
        if targets & set(found):
            found = [c for c in found if c not in targets] + _chains(loop.iter)
    random = {c for c in found for v in valuesources.assigned(scope, c) if isinstance(v, ast.Call) and valuesources.callee(v).startswith(("rand", "normal"))}
    return [c for c in dict.fromkeys(found) if c not in random and c.partition(".")[0] not in modules]


def _chains(node: ast.AST) -> list[str]:
    """`self.total` of `float(self.total)`, `loss` of `loss.item()`; nothing of `len(loader)`."""
    if isinstance(node, ast.Call):
        inside = [] if _is(node.func, "len") else [*node.args, *(k.value for k in node.keywords)]
        owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
        return [c for n in (*owner, *inside) for c in _chains(n)]
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and not any(isinstance(n, (ast.Call, ast.Subscript)) for n in ast.walk(node)):
        return [ast.unparse(node)]
    return [c for n in ast.iter_child_nodes(node) if isinstance(n, (ast.expr, ast.comprehension)) for c in _chains(n)]


def _use(name: str, call: ast.Call, scope: Scope, tree: ast.Module) -> int:
    """The line of the first use behind the call; of an attribute also in other functions, though not where it is counted up; 0 for none."""
    end = call.end_lineno or call.lineno
    root, _, attribute = name.partition(".")
    asked = {id(n.value) for n in syntax.nodes(scope) if isinstance(n, ast.Attribute) and n.attr in DESCRIPTIONS}
    within = [n for n in syntax.nodes(scope) if isinstance(n, ast.expr) and n.lineno > end and id(n) not in asked and _reads(n, name)]
    if within or not attribute or attribute.count("."):
        return min((n.lineno for n in within), default=0)
    owner = valuesources.owner_of(tree, scope.lineno) if root == "self" else None
    functions = [f for f in syntax.functions(tree) if f is not scope and f.name not in RESETS]
    nodes = [n for f in functions if owner is None or f in syntax.nodes(owner) for n in syntax.own_nodes(f) if isinstance(n, ast.Attribute)]
    return min((n.lineno for n in nodes if _reads_attribute(n, attribute, root)), default=0)


def _reads(node: ast.expr, name: str) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and ast.unparse(node) == name


def _reads_attribute(node: ast.Attribute, attribute: str, root: str) -> bool:
    return node.attr == attribute and isinstance(node.ctx, ast.Load) and (root != "self" or _is(node.value, "self"))


def _is_written(name: str, call: ast.Call, scope: Scope) -> bool:
    """Given another value behind the call: by what, the run knows."""
    stored = [n for n in syntax.nodes(scope) if isinstance(n, (ast.Name, ast.Attribute)) and isinstance(n.ctx, ast.Store)]
    return any(ast.unparse(n) == name and n.lineno > (call.end_lineno or call.lineno) for n in stored)
