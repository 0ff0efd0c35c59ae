"""Files that differ from one in the numbers of their names only."""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from itertools import islice

from . import cuts, syntax

MAX_ENTRIES = 2000  # of a folder; about 1 ms
_DIGITS = re.compile(r"\d+")
LISTS = {"glob", "iglob", "rglob", "listdir", "iterdir", "scandir", "walk"}
REMOVES = {"unlink", "remove", "rmtree"}


def newest(path: str) -> str:
    """The name of the one with the highest number, where that was written no earlier than `path`, and `path` is the last in the order of
    letters; else "".
    """
    folder, name = os.path.split(path)
    if not _DIGITS.search(name):
        return ""
    try:
        with os.scandir(folder) as entries:
            alike = [e.name for e in islice(entries, MAX_ENTRIES) if _DIGITS.sub("#", e.name) == _DIGITS.sub("#", name)]
        last = max(alike, key=_numbers, default=name)
        if last == name or max(alike) != name or _numbers(last) == _numbers(name):
            return ""
        return last if os.stat(os.path.join(folder, last)).st_mtime_ns >= os.stat(path).st_mtime_ns else ""
    except OSError:
        return ""


def _numbers(name: str) -> list[int]:
    return [int(n) for n in _DIGITS.findall(name)]


def are_sorted() -> bool:
    """Whether the script may take the last of a folder's names by the order of letters; a path that is made from a number (the best epoch's) was
    chosen by that number."""
    files = cuts.user_files()
    return len(files) > cuts.MAX_FILES or any(sorts(name) for name in files)


@cache
def sorts(file: str) -> bool:
    """A function of this file that lists a folder, sorts it or takes its maximum without a key, and removes nothing."""
    tree = syntax.tree(file)
    for scope in (tree, *syntax.functions(tree)) if tree is not None else ():
        calls = [n for n in syntax.own_nodes(scope) if isinstance(n, ast.Call)]
        names = {_callee(n) for n in calls}
        ordered = any(_callee(n) in ("sorted", "sort", "max") and not any(k.arg == "key" for k in n.keywords) for n in calls)
        if ordered and names & LISTS and not names & REMOVES:
            return True
    return False


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
