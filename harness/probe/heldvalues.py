"""Tensors within reach of the script's running frames, and the names under which they are held: `kept`, `self.shadow`, a copy of the model.

Looked at a handful of times a run. Nothing is held afterwards, and nothing is called that could be the script's own code.
"""

from __future__ import annotations

import sys
import weakref
from argparse import Namespace
from collections import deque
from inspect import CO_OPTIMIZED
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from . import digests, sites, variables

MAX_FRAMES, MAX_DEPTH, MAX_PARTS, MAX_VISITED = 6, 5, 512, 4000
ATTRIBUTE, EVERYWHERE = 0, -1
DULL = frozenset({str, bytes, int, float, complex, bool, type(None), type, ModuleType, FunctionType, BuiltinFunctionType, MethodType})


class Name(NamedTuple):
    """Of a variable, read in the function around a line of its file, or of an attribute, read in any of these files."""

    files: tuple[str, ...]  # empty: not to be told
    line: int  # ATTRIBUTE; EVERYWHERE: of a variable of the module
    name: str


class Way(NamedTuple):
    """To an entry of an object's attribute, whichever tensor lies there: `self.shadow[name]` is a new one after each update."""

    owner: weakref.ref[Any]
    attribute: str
    keys: tuple[str | int, ...] = ()

    def end(self) -> Any:
        one: Any = _own(self.owner()).get(self.attribute)
        for key in self.keys:
            if isinstance(key, str):
                one = dict.get(one, key) if issubclass(type(one), dict) else None
            else:
                one = one[key] if type(one) in (list, tuple) and key < len(one) else None
        return one


class Held(NamedTuple):
    tensor: Any
    name: Name  # the last variable or attribute on the way to it
    way: Way | None


_Place = tuple[Any, Name, "Way | None", int]  # what is looked into, its name, the way to it, how deep it lies


def tensors(frame: FrameType | None, shape: Any) -> list[Held]:
    """Those of a shape, nearest first. One of them may be named twice, but not the parts of a model."""
    found: list[Held] = []
    walk = _Walk(shape, found)
    outer = sites.user_frame(frame)
    for _ in range(MAX_FRAMES):
        if outer is None:
            break
        held = outer.f_locals
        used = {n: outer.f_globals[n] for n in outer.f_code.co_names if n in outer.f_globals} if held is not outer.f_globals else {}
        starts: list[_Place] = [(v, _name(outer, n), None, 0) for group in (held, used) for n, v in list(group.items())[:MAX_PARTS] if type(v) not in DULL]
        variables.let_go(outer, held)
        del held, used
        walk.from_(starts)
        outer = sites.user_frame(outer.f_back)
    return found


def _name(frame: FrameType, name: str) -> Name:
    code = frame.f_code
    if name in code.co_freevars:
        return Name((), EVERYWHERE, name)  # read in the functions around as well
    own = code.co_flags & CO_OPTIMIZED and (name in code.co_varnames or name in code.co_cellvars)
    return Name((code.co_filename,), sites.line(frame) if own else EVERYWHERE, name)


class _Walk:
    """Over what can be reached, breadth first; about 1 us each."""

    def __init__(self, shape: Any, found: list[Held]) -> None:
        import torch

        self.shape, self.found = shape, found
        self.seen: set[tuple[int, str]] = set()
        self.visits = 0
        self.module, self.kinds = torch.nn.Module, (torch.Tensor, torch.nn.Parameter)
        self.closed = (torch.Tensor, torch.optim.Optimizer, torch.utils.data.DataLoader, torch.utils.data.Dataset)

    def from_(self, starts: list[_Place]) -> None:
        todo = deque(starts)
        while todo and self.visits < MAX_VISITED:
            one, name, way, depth = todo.popleft()
            self.visits += 1
            kind = type(one)  # of isinstance() a proxy would be asked
            if kind in self.kinds:
                if one.shape == self.shape and digests.plain(one):
                    self.found.append(Held(one, name, way))
                continue
            module = issubclass(kind, self.module)
            key = id(one), "" if module else name.name
            if key in self.seen or issubclass(kind, self.closed):
                continue
            self.seen.add(key)
            if module:
                self._module(one, kind, name, depth, todo)
            elif depth >= MAX_DEPTH:
                continue
            elif issubclass(kind, dict):
                todo.extend(
                    (v, name, way._replace(keys=(*way.keys, k)) if way is not None and type(k) is str else None, depth + 1)
                    for k, v in list(dict.items(one))[:MAX_PARTS]
                    if type(v) not in DULL
                )
            elif kind in (list, tuple):
                todo.extend(
                    (v, name, way._replace(keys=(*way.keys, at)) if way is not None else None, depth + 1)
                    for at, v in enumerate(one[:MAX_PARTS])
                    if type(v) not in DULL
                )
            else:
                self._attributes(one, kind, name, depth, todo)

    def _module(self, one: Any, kind: type, name: Name, depth: int, todo: deque[_Place]) -> None:
        """Its parameters, and those of its layers, are as near as itself."""
        own = _own(one)
        for held in ("_parameters", "_buffers"):
            for tensor in list((own.get(held) or {}).values()):
                if type(tensor) in self.kinds and tensor.shape == self.shape:
                    todo.append((tensor, name, None, depth))
        todo.extend((layer, name, None, depth) for layer in list((own.get("_modules") or {}).values()) if layer is not None)
        if depth < MAX_DEPTH and not kind.__module__.startswith("torch."):
            self._attributes(one, kind, name, depth, todo)

    def _attributes(self, one: Any, kind: type, name: Name, depth: int, todo: deque[_Place]) -> None:
        module = issubclass(kind, self.module)
        own = [(k, v) for k, v in list(_own(one).items())[:MAX_PARTS] if type(v) not in DULL and not (module and k.startswith("_"))]
        if not own:
            return
        made_in = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
        mine = sites.is_user_file(made_in)  # what an installed package's object holds may be read by the package
        files = tuple(dict.fromkeys((made_in, *name.files))) if mine else name.files if kind in (SimpleNamespace, Namespace) else ()
        owner = weakref.ref(one)
        todo.extend((v, Name(files, ATTRIBUTE, k), Way(owner, k), depth + 1) for k, v in own)


def _own(one: Any) -> dict[str, Any]:
    """None of what cannot be referred to weakly."""
    return own_attributes(one) if type(one).__weakrefoffset__ else {}


def own_attributes(one: Any) -> dict[str, Any]:
    """What an object of a class in Python holds, without a call of the script's code."""
    try:
        own = object.__getattribute__(one, "__dict__")
    except AttributeError:
        return {}
    return own if type(own) is dict else {}
