"""Where the source reads a launcher's variable with a default (`os.environ.get("SLURM_PROCID", 0)`), and whether what is read decides which samples a rank takes.

Followed by name through assignments, attributes, fields, arguments and returned values of one file; a read that has another source beside it is no
answer. Where the file has a data set or a loader, a cut counts only if it is made in one or goes into one: cores, a log or a checked batch size are
cut as well. A variable of the node (SLURM_LOCALID) is none of a share.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from . import syntax
from .valuesources import callee

VARIABLES = frozenset((
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
))  # fmt: skip
CUTS = ("DistributedSampler", "islice", "range", "shard", "split_dataset_by_node")
DATA = re.compile("loader|dataset|sampler|datapipe", re.IGNORECASE)
ADDS = ("append", "add", "extend", "update")
ROUNDS = 5
Scope = syntax.Function | ast.ClassDef


class Read(NamedTuple):
    line: int
    variable: str
    default: str
    cut: int  # the line that takes a share by it


def defaults_that_cut(tree: ast.Module, unset: Collection[str]) -> list[Read]:
    """Reads of variables that are not set, whose default therefore counts."""
    found = []
    for scope, statement in _statements(tree):
        for node in ast.walk(statement):
            read = _read(node)
            if read is None or read[0] not in unset or "LOCAL" in read[0] or _doubtful(tree, scope, statement, unset):
                continue
            cut = _Flow(tree, node).cut()
            if cut:
                found.append(Read(node.lineno, *read, cut))  # type: ignore[attr-defined]
    return sorted(set(found))


def _read(node: ast.AST) -> tuple[str, str] | None:
    """(variable, default) of a read by `get` or `getenv` that has a constant for what is not set."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and len(node.values) == 2 and isinstance(node.values[1], ast.Constant):
        name = _variable(node.values[0])
        return (name, str(node.values[1].value)) if name else None
    if isinstance(node, ast.Call) and len(node.args) == 2 and isinstance(node.args[1], ast.Constant) and node.args[1].value is not None:
        name = _variable(node)
        return (name, str(node.args[1].value)) if name else None
    return None


def _variable(node: ast.AST) -> str:
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return ""
    key = node.args[0].value
    return key if callee(node) in ("get", "getenv") and isinstance(key, str) and key in VARIABLES else ""


def _doubtful(tree: ast.Module, scope: Scope, statement: ast.stmt, unset: Collection[str]) -> bool:
    """Another source stands beside it: in the statement a variable that is set or a choice, around it a question, elsewhere a second value."""
    inner = list(ast.walk(statement))
    said = {n.value for n in inner if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    if (said & VARIABLES) - set(unset) or any(isinstance(n, ast.IfExp) for n in inner):
        return True
    around = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.If) and syntax.spans(n, statement.lineno)]
    if any(word in ast.unparse(n.test) for n in around for word in ("environ", "getenv", "SLURM", "slurm", "MPI", "mpi")):
        return True
    return any(_given_again(tree, scope, statement, target) for target in _targets(statement))


def _given_again(tree: ast.Module, scope: Scope, statement: ast.stmt, target: ast.expr) -> bool:
    name = target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
    attribute = isinstance(target, ast.Attribute) or isinstance(scope, ast.ClassDef)
    for node in syntax.nodes(tree):
        targets = _targets(node) if node is not statement else []
        if attribute and any(isinstance(t, ast.Attribute) and t.attr == name for t in targets):
            return True
        if isinstance(scope, ast.ClassDef) and isinstance(node, ast.Call) and callee(node) == scope.name and _given(node):
            return True
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return True
    own = [t for n in syntax.own_nodes(scope) if n is not statement for t in _targets(n)]
    return any(isinstance(t, ast.Name) and t.id == name for t in own) and not isinstance(target, ast.Attribute)


def _scopes(tree: ast.Module) -> list[Scope]:
    return [tree, *(n for n in syntax.nodes(tree) if isinstance(n, (*syntax.FUNCTIONS, ast.ClassDef)))]


def _statements(tree: ast.Module) -> Iterator[tuple[Scope, ast.stmt]]:
    for scope in _scopes(tree):
        for node in syntax.own_nodes(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
                yield scope, node


def _targets(statement: ast.AST) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AnnAssign) else []


class _Flow:
    """What one expression's value goes into: names of a scope, attributes by name, calls of functions that return it."""

    def __init__(self, tree: ast.Module, source: ast.AST, held: Collection[tuple[int, str]] = ()) -> None:
        self.tree, self.source = tree, source
        self.held = set(held)  # (scope, name); scope 0: an attribute; 1: the function of this name returns it
        self.bound = {id(s): _bound(s) for s in _scopes(tree)}
        self.defined = {n.name: n for n in syntax.nodes(tree) if isinstance(n, (*syntax.FUNCTIONS, ast.ClassDef))}
        for _ in range(ROUNDS):
            before = len(self.held)
            for scope in _scopes(tree):
                self._through(scope)
            if len(self.held) == before:
                break

    def cut(self) -> int:
        """The first line that takes a share by it."""
        own = [(scope, node) for scope in _scopes(self.tree) for node in syntax.own_nodes(scope)]
        tests = _tests(self.tree)
        cuts = [(n, s) for s, n in own if isinstance(n, ast.expr) and n not in tests and self._cuts(n, s)]
        data = _data_classes(self.tree)
        if not data and not any(isinstance(n, ast.Call) and DATA.search(callee(n)) for _, n in own):
            return min((n.lineno for n, _ in cuts), default=0)  # the data set is in another file
        return next((n.lineno for n, s in sorted(cuts, key=lambda c: c[0].lineno) if _Reach(self.tree, n, s, data).found()), 0)

    def _cuts(self, node: ast.expr, scope: Scope) -> bool:
        """`files[rank::world]`, `i % world`, `i % world == rank`, `range(rank, n, world)`; not `"%d" % rank`, `rank % num_devices`, `range(world)`."""
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Slice) and self._any(node.slice, scope)
        if isinstance(node, ast.BinOp):
            return _is_mod(node) and self._any(node.right, scope)
        if isinstance(node, ast.Compare):
            return any(_is_mod(n) for n in ast.walk(node)) and any(self._any(n, scope) for n in node.comparators)
        return isinstance(node, ast.Call) and callee(node) in CUTS and len(_given(node)) > 1 and any(self._any(a, scope) for a in _given(node))

    def _through(self, scope: Scope) -> None:
        for node in syntax.own_nodes(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in _targets(node):
                    self._assign(target, node.value, scope)
            elif isinstance(node, ast.Return) and node.value is not None and self._any(node.value, scope):
                self.held.add((1, getattr(scope, "name", "")))
            elif isinstance(node, ast.Call) and callee(node) in self.defined:
                self._pass(node, self.defined[callee(node)], scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: Scope) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its, scope)
        elif self._any(value, scope):
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Name):
                    self.held.add((0 if isinstance(scope, ast.ClassDef) else id(scope), one.id))
                elif isinstance(one, ast.Attribute):
                    self.held.add((0, one.attr))

    def _pass(self, call: ast.Call, to: syntax.Function | ast.ClassDef, scope: Scope) -> None:
        made = next((f for f in to.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None) if isinstance(to, ast.ClassDef) else to
        if made is None:  # a dataclass: its fields in their order
            named = [s.target.id for s in getattr(to, "body", ()) if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
            key = 0
        else:
            named, key = [a.arg for a in getattr(made, "args").args], id(made)  # noqa: B009
            named = named[1:] if isinstance(to, ast.ClassDef) else named
        given = [*zip(named, call.args, strict=False), *((k.arg, k.value) for k in call.keywords if k.arg)]
        self.held.update((key, name) for name, value in given if self._any(value, scope))

    def _any(self, node: ast.AST, scope: Scope) -> bool:
        return any(n is self.source or self._holds(n, scope) for n in ast.walk(node))

    def _holds(self, node: ast.AST, scope: Scope) -> bool:
        if isinstance(node, ast.Name):
            where = id(scope) if node.id in self.bound[id(scope)] else id(self.tree)
            return (where, node.id) in self.held
        if isinstance(node, ast.Attribute):
            return (0, node.attr) in self.held
        return isinstance(node, ast.Call) and (1, callee(node)) in self.held


class _Reach(_Flow):
    """Whether a share goes into a data set, a sampler or a loader: by what it is assigned to, or by what is gathered in the loop or branch that it decides."""

    def __init__(self, tree: ast.Module, cut: ast.expr, scope: Scope, data: list[ast.ClassDef]) -> None:
        self.data = data
        super().__init__(tree, cut, _decided(cut, scope))

    def found(self) -> bool:
        assert isinstance(self.source, ast.expr)
        if self._in_data(self.source) or (isinstance(self.source, ast.Call) and DATA.search(callee(self.source))):
            return True
        return any(self._takes(node, scope) for scope in _scopes(self.tree) for node in syntax.own_nodes(scope))

    def _takes(self, node: ast.AST, scope: Scope) -> bool:
        if isinstance(node, ast.Call) and (DATA.search(callee(node)) or callee(node) in {c.name for c in self.data}):
            return any(self._any(a, scope) for a in _given(node))
        return isinstance(node, ast.expr) and self._in_data(node) and self._holds(node, scope)

    def _in_data(self, node: ast.expr) -> bool:
        return any(syntax.spans(c, node.lineno) for c in self.data)

    def _through(self, scope: Scope) -> None:
        super()._through(scope)
        for node in syntax.own_nodes(scope):
            if isinstance(node, ast.For) and self._any(node.iter, scope):
                self._assign(node.target, node.iter, scope)
            elif isinstance(node, (ast.Yield, ast.YieldFrom)) and node.value is not None and self._any(node.value, scope):
                self.held.add((1, getattr(scope, "name", "")))
            elif isinstance(node, ast.Call) and (name := _added_to(node)) and any(self._any(a, scope) for a in _given(node)):
                self.held.add((id(scope), name))


def _decided(cut: ast.expr, scope: Scope) -> set[tuple[int, str]]:
    """What a loop over it, or a branch by it, gathers; `if i % world != rank: continue` decides on the rest of its loop."""
    own = syntax.own_nodes(scope)
    blocks: list[ast.stmt] = [n for n in own if isinstance(n, ast.For) and cut in syntax.nodes(n.iter)]
    for branch in (n for n in own if isinstance(n, ast.If) and cut in syntax.nodes(n.test)):
        around = [n for n in own if isinstance(n, ast.For) and syntax.spans(n, branch.lineno)]
        skips = any(isinstance(n, ast.Continue) for n in branch.body)
        blocks.append(max(around, key=lambda n: n.lineno) if skips and around else branch)
    inner = [n for block in blocks for n in syntax.nodes(block)]
    stored = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    added = {name for n in inner if isinstance(n, ast.Call) and (name := _added_to(n))}
    gives = any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in inner)
    return {(id(scope), name) for name in stored | added} | ({(1, getattr(scope, "name", ""))} if gives else set())


def _added_to(call: ast.Call) -> str:
    to = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in ADDS else None
    return to.id if isinstance(to, ast.Name) else ""


def _data_classes(tree: ast.Module) -> list[ast.ClassDef]:
    """Those that say so by what they inherit from, or that hand out samples."""
    gives = ("__iter__", "__getitem__")
    classes = [n for n in syntax.nodes(tree) if isinstance(n, ast.ClassDef)]
    return [c for c in classes if any(DATA.search(ast.unparse(b)) for b in c.bases) or any(getattr(f, "name", "") in gives for f in c.body)]


def _tests(tree: ast.Module) -> set[ast.AST]:
    """What stands in an assertion, and `batch % tasks == 0`."""
    said = [n for n in syntax.nodes(tree) if isinstance(n, ast.Assert)]
    divides = [n for n in syntax.nodes(tree) if isinstance(n, ast.Compare) and all(isinstance(c, ast.Constant) for c in n.comparators)]
    return {inner for n in (*said, *divides) for inner in syntax.nodes(n)}


def _bound(scope: Scope) -> set[str]:
    given = {a.arg for a in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)} if isinstance(scope, syntax.FUNCTIONS) else set()
    return given | {n.id for n in syntax.own_nodes(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _is_mod(node: ast.AST) -> bool:
    text = isinstance(node, ast.BinOp) and isinstance(node.left, (ast.Constant, ast.JoinedStr))
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not text


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(k.value for k in call.keywords)]
