"""Which attributes of an object the code reads that runs in a loader's worker: from its methods there, and what they call on self.

Left out: what that code itself assigns or fills (a cache, a counter), what stands in a message, an assertion or a print, and what a function that
asks `get_worker_info()` reads in one of its branches only, which may be the main process's.
"""

from __future__ import annotations

import ast
import weakref
from dataclasses import dataclass, field
from typing import Any

from . import sites, syntax

FILLS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "appendleft", "remove", "setdefault", "update"}
SAYS = {"print", "log", "debug", "info", "warning", "warn", "error", "write"}
LOOKS = (ast.Subscript, ast.Compare, ast.For, ast.comprehension, ast.BinOp, ast.BoolOp, ast.If, ast.IfExp, ast.JoinedStr, ast.Attribute)
ASKS = {"all", "any", "bool", "dict", "enumerate", "len", "list", "max", "min", "range", "set", "sorted", "sum", "tuple", "zip"}
MAX_METHODS = 30
Path = tuple[str, ...]


@dataclass
class Reads:
    at: dict[Path, sites.Site] = field(default_factory=dict)  # ("max_len",) or ("transform", "strength") -> the first read
    firm: set[Path] = field(default_factory=set)  # read whichever way the code goes
    handed_on: set[Path] = field(default_factory=set)  # under another name, or to a call, which may fill it
    own: set[str] = field(default_factory=set)  # assigned or filled by this code
    called: dict[str, set[str]] = field(default_factory=dict)  # name of what is held -> its methods that are called; "" for itself


_known: weakref.WeakKeyDictionary[type, dict[frozenset[str], Reads]] = weakref.WeakKeyDictionary()


def of(kind: type, entries: frozenset[str]) -> Reads:
    """What these methods of a class of the user's read; worked out once."""
    known = _known.setdefault(kind, {})
    if entries not in known:
        known[entries] = _of(kind, entries)
    return known[entries]


def _of(kind: type, entries: frozenset[str]) -> Reads:
    found = Reads()
    todo = [(name, True) for name in sorted(entries)]
    done: set[str] = set()
    while todo and len(done) < MAX_METHODS:
        name, firm = todo.pop(0)
        method = None if name in done else _source(kind, name)
        done.add(name)
        if method is not None and method[1].args.args:
            reader = _Reader(kind, method[0], method[1], found)
            reader.block(method[1].body, firm)
            todo.extend(reader.calls)
    return found


def sources(kind: type, entries: frozenset[str]) -> list[tuple[str, ast.FunctionDef]]:
    """These methods of a class of the user's, and what they call on self, with their files."""
    todo = sorted(entries)
    found: dict[str, tuple[str, ast.FunctionDef]] = {}
    while todo and len(found) < MAX_METHODS:
        name = todo.pop(0)
        method = None if name in found else _source(kind, name)
        if method is not None:
            found[name] = method
            used = [n for n in syntax.nodes(method[1]) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
            todo.extend(n.attr for n in used if n.value.id == "self")  # type: ignore[attr-defined]
    return list(found.values())


def _source(kind: type, name: str) -> tuple[str, ast.FunctionDef] | None:
    """A method's or property's file and syntax, where it is the user's own and bound to an instance."""
    held = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    code = getattr(getattr(held, "fget", held), "__code__", None)
    tree = syntax.tree(code.co_filename) if code is not None and sites.is_user_code(code) else None
    if tree is None or code is None:
        return None
    for node in syntax.functions(tree):
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if isinstance(node, ast.FunctionDef) and node.name == name and first == code.co_firstlineno:
            return code.co_filename, node
    return None


class _Reader:
    """Goes through one method; `calls` are the methods and properties of the object that it uses in turn."""

    def __init__(self, kind: type, file: str, method: ast.FunctionDef, found: Reads) -> None:
        self.kind, self.file, self.function, self.found = kind, file, method.name, found
        self.me = method.args.args[0].arg
        self.asks = any("get_worker_info" in (getattr(n, "attr", ""), getattr(n, "id", "")) for n in syntax.nodes(method))
        self.calls: list[tuple[str, bool]] = []

    def block(self, body: list[ast.stmt], firm: bool) -> None:
        for statement in body:
            self.visit(statement, firm)
            firm = firm and not any(isinstance(n, (ast.Return, ast.Continue, ast.Break)) for n in ast.walk(statement))

    def visit(self, node: ast.AST, firm: bool) -> None:
        if _only_says(node):
            return
        path = self.path(node)
        if path:
            self.note(path, node, firm)
            return
        self.fills(node)
        for name, value in ast.iter_fields(node):
            certain = firm and not (isinstance(node, (ast.If, ast.IfExp, ast.While)) and name != "test") and not isinstance(node, ast.ExceptHandler)
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self.block(value, certain)
            elif isinstance(node, ast.BoolOp) and isinstance(value, list):
                self.visit(value[0], firm)
                for other in value[1:]:
                    self.visit(other, False)
            else:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child, certain)
                        if not isinstance(node, LOOKS) and not (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ASKS):
                            self.found.handed_on.add(self.path(child))

    def path(self, node: ast.AST) -> Path:
        """("a",) of `self.a`, ("a", "b") of `self.a.b`; empty for anything else."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        return tuple(names[:2]) if names and isinstance(node, ast.Name) and node.id == self.me else ()

    def note(self, path: Path, node: ast.AST, firm: bool) -> None:
        if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
            self.found.own.add(path[0])
            return
        if len(path) == 2 and path[1] in FILLS:
            self.found.own.add(path[0])
        if hasattr(self.kind, path[0]) and _source(self.kind, path[0]) is not None:
            self.calls.append((path[0], firm))
            return
        self.found.called.setdefault(path[0], set()).update(path[1:])
        if self.asks and not firm:
            return
        for known in (path[:1], path):
            self.found.at.setdefault(known, (self.file, getattr(node, "lineno", 0), self.function))
            if firm:
                self.found.firm.add(known)

    def fills(self, node: ast.AST) -> None:
        """`self.cache[key] = value`."""
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)) and (path := self.path(node.value)):
            self.found.own.add(path[0])


def _only_says(node: ast.AST) -> bool:
    """A message, an assertion, or an `if` that does nothing else."""
    if isinstance(node, (ast.Raise, ast.Assert)):
        return True
    if isinstance(node, ast.If):
        return not node.orelse and all(_only_says(n) or isinstance(n, ast.Pass) for n in node.body)
    call: Any = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and (call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")) in SAYS
