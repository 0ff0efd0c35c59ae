"""Statements that copy into weights which an optimizer trains: a swap for a preview, a sync by hand, an edit.

Event "overwrite" (first MAX_TOLD, MAX_SAME a statement; once a statement and step): site (innermost), callers (the user's frames, innermost first),
guard (of these, the innermost that stands under an `if` whose condition names a rank or a main process, where there is one).
From the first optimizer step on, in jobs of several processes; which ranks write is for the check to compare. `p.data = other` calls nothing that could be
seen. About 1 us a copy_ of the script's; a statement that has missed the weights in MAX_MISSES steps is asked no more.
"""

from __future__ import annotations

import ast
import re
from typing import Any

from .. import copies, digests, sites, syntax
from ..state import S
from . import steps

MAX_TOLD, MAX_SAME, MAX_MISSES, REFRESH = 64, 16, 32, 64
CHIEF = re.compile(r"rank|main|master|chief|primary|leader", re.IGNORECASE)
_known: list[Any] = [-REFRESH, 0, frozenset()]  # when it was read, of how many optimizers, where their parameters lie
_asked: dict[sites.Site, list[int]] = {}  # statement -> [step that was missed last, steps missed, step that was told last, times told]
_told = [0]
_off = [True]  # emptied once copies are watched


def _weights() -> frozenset[int]:
    if S.steps - _known[0] >= REFRESH or _known[1] != len(steps._known):
        _known[:] = [S.steps, len(steps._known), frozenset(steps.weights())]
    return _known[2]  # type: ignore[no-any-return]


def _look(written: Any, source: Any, site: sites.Site) -> bool:
    asked = _asked.setdefault(site, [-1, 0, -1, 0])
    if asked[1] >= MAX_MISSES or asked[3] >= MAX_SAME or _told[0] >= MAX_TOLD:
        return True
    if asked[2] == S.steps:
        return False
    if digests.address(written) not in _weights():
        asked[1] += asked[0] != S.steps
        asked[0] = S.steps
    else:
        asked[2] = S.steps
        asked[3] += 1
        _told[0] += 1
        callers = sites.stack(4)
        guard = next((at for at in callers if _is_guarded(at)), None)
        S.recorder.event("overwrite", site, callers=[sites.as_json(at) for at in callers], guard=sites.as_json(guard) if guard else None)
    return False


def _is_guarded(at: sites.Site) -> bool:
    tree = syntax.tree(at[0])
    own = syntax.own_nodes(syntax.function_at(tree, at[1])) if tree is not None else ()
    around = [n for n in own if isinstance(n, ast.If) and any(syntax.spans(s, at[1]) for s in (*n.body, *n.orelse))]
    return any(CHIEF.search(ast.unparse(n.test)) and "__name__" not in ast.unparse(n.test) for n in around)


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if S.group is not None and S.group.size() > 1:
        _off.clear()
        copies.watch(__name__, _look)


def arm() -> None:
    steps.at_step.append(_at_step, when=_off)
