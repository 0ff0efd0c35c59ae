"""Where the source reads a launcher's variable with a default (`os.environ.get("SLURM_PROCID", 0)`), and whether what is read decides which samples a rank takes.

Followed by name through assignments, attributes, fields, arguments and returned values of one file; a read that has another source beside it is no
answer.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from typing import NamedTuple

from . import syntax

VARIABLES = frozenset((
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
))  # fmt: skip
CUTS = ("DistributedSampler", "islice", "range", "shard", "split_dataset_by_node")
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
            if read is None or read[0] not in unset or _doubtful(tree, scope, statement, unset):
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
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    key = node.args[0].value
    return key if called in ("get", "getenv") and isinstance(key, str) and key in VARIABLES else ""


def _doubtful(tree: ast.Module, scope: Scope, statement: ast.stmt, unset: Collection[str]) -> bool:
    """Another source stands beside it: in the statement a variable that is set or a choice, around it a question, elsewhere a second value."""
    inner = list(ast.walk(statement))
    said = {n.value for n in inner if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    if (said & VARIABLES) - set(unset) or any(isinstance(n, ast.IfExp) for n in inner):
        return True
    around = [n for n in _own(scope) if isinstance(n, ast.If) and syntax.spans(n, statement.lineno)]
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
        if isinstance(scope, ast.ClassDef) and isinstance(node, ast.Call) and _called(node) == scope.name and _given(node):
            return True
        if isinstance(node, (ast.Global, ast.Nonlocal)) and name in node.names:
            return True
    own = [t for n in _own(scope) if n is not statement for t in _targets(n)]
    return any(isinstance(t, ast.Name) and t.id == name for t in own) and not isinstance(target, ast.Attribute)


def _own(scope: Scope) -> tuple[ast.AST, ...]:
    return syntax.own_nodes(scope)


def _scopes(tree: ast.Module) -> list[Scope]:
    return [tree, *(n for n in syntax.nodes(tree) if isinstance(n, (*syntax.FUNCTIONS, ast.ClassDef)))]


def _statements(tree: ast.Module) -> Iterator[tuple[Scope, ast.stmt]]:
    for scope in _scopes(tree):
        for node in _own(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
                yield scope, node


def _targets(statement: ast.AST) -> list[ast.expr]:
    return statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AnnAssign) else []


class _Flow:
    """What one expression's value goes into: names of a scope, attributes by name, calls of functions that return it."""

    def __init__(self, tree: ast.Module, source: ast.AST) -> None:
        self.tree, self.source = tree, source
        self.held: set[tuple[int, str]] = set()  # (scope, name); scope 0: an attribute; 1: the function of this name returns it
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
        own = [(scope, node) for scope in _scopes(self.tree) for node in _own(scope)]
        return min((node.lineno for scope, node in own if isinstance(node, ast.expr) and self._cuts(node, scope)), default=0)

    def _cuts(self, node: ast.expr, scope: Scope) -> bool:
        """`files[rank::world]`, `i % world`, `i % world == rank`, `range(rank, n, world)`; not `"%d" % rank`, `rank % num_devices`, `range(world)`."""
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Slice) and self._any(node.slice, scope)
        if isinstance(node, ast.BinOp):
            return _is_mod(node) and self._any(node.right, scope)
        if isinstance(node, ast.Compare):
            return any(_is_mod(n) for n in ast.walk(node)) and any(self._any(n, scope) for n in node.comparators)
        return isinstance(node, ast.Call) and _called(node) in CUTS and len(_given(node)) > 1 and any(self._any(a, scope) for a in _given(node))

    def _through(self, scope: Scope) -> None:
        for node in _own(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                for target in _targets(node):
                    self._assign(target, node.value, scope)
            elif isinstance(node, ast.Return) and node.value is not None and self._any(node.value, scope):
                self.held.add((1, getattr(scope, "name", "")))
            elif isinstance(node, ast.Call) and _called(node) in self.defined:
                self._pass(node, self.defined[_called(node)], scope)

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
        return isinstance(node, ast.Call) and (1, _called(node)) in self.held


def _bound(scope: Scope) -> set[str]:
    given = {a.arg for a in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs)} if isinstance(scope, syntax.FUNCTIONS) else set()
    return given | {n.id for n in _own(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _is_mod(node: ast.AST) -> bool:
    text = isinstance(node, ast.BinOp) and isinstance(node.left, (ast.Constant, ast.JoinedStr))
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not text


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(k.value for k in call.keywords)]
