"""Which name of the user's keeps graphs alive, and the statement that puts them there. Asked only when graphs pile up, so it may cost a few ms.

Looks at the locals of the user's frames, one or two attributes deep: a container with many tensors that have a graph, or a tensor that is a long
chain of additions. Keeps nothing of what it saw.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from . import sites

MAX_LOOKED, MAX_NAMES = 256, 200
CHAIN = ("AddBackward0", "MulBackward0", "SubBackward0", "DivBackward0", "LerpBackward0", "LerpBackward1", "CatBackward0", "StackBackward0")
GROWS = r"[^=\n]*\.(?:append|extend|add|insert|put|appendleft|update|setdefault)\("
OPTIMIZED = 0x1


def find(frame: FrameType | None, at_least: int) -> dict[str, Any] | None:
    """{"name", "kind", "num", "site", "bounded"} of the name that keeps the most graphs; None where none is found."""
    best: tuple[int, str, Any, CodeType, bool] | None = None
    for user in _frames(frame):
        code = user.f_code
        for name, value, owner in _named(user):
            num = count(value)
            if num >= at_least and (best is None or num > best[0]):
                bounded = isinstance(value, deque) and value.maxlen is not None
                best = (num, name, _source_of(owner, code), code, bounded)
    if best is None:
        return None
    num, name, file, code, bounded = best
    return {"name": name, "num": num, "bounded": bounded, "site": sites.as_json(statement(file, name, code) or sites.UNKNOWN)}


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    for _ in range(6):
        frame = sites.user_frame(frame)
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _locals(frame: FrameType) -> list[tuple[str, Any]]:
    """A copy of the frame's names. Before 3.13 the frame keeps the snapshot that f_locals makes: it is emptied, or it would hold the user's tensors."""
    if not frame.f_code.co_flags & OPTIMIZED:
        return list(frame.f_locals.items())
    snapshot = frame.f_locals
    copied = list(snapshot.items())
    if sys.version_info < (3, 13):
        snapshot.clear()
    return copied


def _named(frame: FrameType) -> Iterator[tuple[str, Any, Any]]:
    """(name, value, object that has it as an attribute or None)."""
    for name, value in _locals(frame)[:MAX_NAMES]:
        yield name, value, None
        if hasattr(value, "__dict__") and not isinstance(value, type) and sites_of_class(value):
            for attribute, inner in list(vars(value).items())[:MAX_NAMES]:
                yield f"{name}.{attribute}", inner, value
                if hasattr(inner, "__dict__") and not isinstance(inner, type) and sites_of_class(inner):
                    for deeper, innermost in list(vars(inner).items())[:MAX_NAMES]:
                        yield f"{name}.{attribute}.{deeper}", innermost, inner


def sites_of_class(value: Any) -> str:
    """File of the user's that defines the class of this object; empty for anything else."""
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None) or ""
    return file if file and sites.is_user_file(file) else ""


def _source_of(owner: Any, code: CodeType) -> str:
    return (sites_of_class(owner) if owner is not None else "") or code.co_filename


def count(value: Any, depth: int = 0) -> int:
    """How many graphs this value keeps: tensors with a graph in a container, or additions in a chain."""
    if hasattr(value, "grad_fn"):
        return 0 if value.grad_fn is None else (1 if depth else _chain(value.grad_fn))
    if isinstance(value, dict):
        parts: list[Any] = list(value.values())
    elif isinstance(value, (list, tuple, deque, set)):
        parts = list(value)
    else:
        return 0
    if depth > 2:
        return 0
    looked = parts[-MAX_LOOKED:]
    found = sum(count(part, depth + 1) for part in looked)
    return found * len(parts) // max(1, len(looked))


def _chain(node: Any) -> int:
    """Additions on the way down from a root, through additions and scalings only."""
    num, todo, looked = 0, [node], 0
    seen: set[Any] = set()
    while todo and looked < 2000:
        node = todo.pop()
        if node in seen or type(node).__name__ not in CHAIN:
            continue
        seen.add(node)
        looked += 1
        num += type(node).__name__ in ("AddBackward0", "LerpBackward0", "LerpBackward1")
        todo.extend(n for n, _ in node.next_functions if n is not None)
    return num if num > 2 else 0


def statement(file: str, name: str, code: CodeType) -> sites.Site | None:
    """The line that adds to `name`: within the function for a local, anywhere in the file for an attribute or a global."""
    last = name.rpartition(".")[2]
    word = rf"\b{re.escape(last)}\b"
    patterns = [rf"{word}{GROWS}", rf"{word}(\[[^\]]*\])*\s*[+-]=", rf"{word}\s*=[^=].*{word}", rf"{word}\[[^\]]*\]\s*="]
    lines = linecache.getlines(file)
    inside = {n for _, _, n in code.co_lines() if n} if file == code.co_filename and "." not in name else set()
    first, final = (code.co_firstlineno, max(inside, default=0)) if inside else (1, len(lines))
    if code.co_name == "<module>":
        first, final = 1, len(lines)
    for pattern in patterns:
        for number in range(first, min(final, len(lines)) + 1):
            text = lines[number - 1].split("#")[0]
            if re.search(pattern, text):
                return (file, number, code.co_name)
    return None
