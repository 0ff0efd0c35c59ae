"""A call of init_process_group that a rank of several never came to, and what kept it from it, as the source shows it.

Event "unjoined" (at the end of a rank of several that trained and called none): site (of the first such call in the user's files), decided (the
statement that gives the condition before it its value, or the condition itself; null where there is none, or several calls hang on several).
"""

from __future__ import annotations

import ast
import os

from .. import conditions, cuts, reaching, sites, sources, syntax, valuesources
from ..arm import at_close
from ..patching import quiet
from ..state import S
from . import collectives

MAX_CALLERS = 4


def tell() -> None:
    world = os.environ.get("WORLD_SIZE", "")
    if not S.steps or collectives.called[0] or not world.isdecimal() or int(world) < 2:
        return
    found = unreached()
    if found is not None:
        S.recorder.event("unjoined", found[0], decided=sites.as_json(found[1]) if found[1] is not None else None)


def unreached() -> tuple[sites.Site, sites.Site | None] | None:
    names = cuts.user_files()
    trees = tuple((name, tree) for name in names if (tree := syntax.tree(name)) is not None) if len(names) <= cuts.MAX_FILES else ()
    calls = [(name, n) for name, tree in trees for n in syntax.nodes(tree) if isinstance(n, ast.Call) and valuesources.callee(n) == "init_process_group"]
    if not calls:
        return None
    decided = {_decided(name, call, trees) for name, call in calls}
    return _site(*calls[0], trees), decided.pop() if len(decided) == 1 else None


def _decided(file: str, call: ast.Call, trees: reaching.Trees) -> sites.Site | None:
    """What the innermost condition before the call says, or before that of the function that holds it, if there is one such call alone."""
    for _ in range(MAX_CALLERS):
        at = _site(file, call, trees)
        ways = conditions.before([at])["ways"]
        if ways:
            where = ways[0]["site"]
            return _given(str(where["file"]), int(where["line"])) or (str(where["file"]), int(where["line"]), str(where["func"]))
        tree = dict(trees)[file]
        scope = syntax.function_at(tree, call.lineno)
        callers = reaching.callers(scope, tree, trees) if isinstance(scope, syntax.FUNCTIONS) else []
        if len(callers) != 1:
            return None
        file, call = next(name for name, t in trees if t is callers[0][0]), callers[0][1]
    return None


def _given(file: str, line: int) -> sites.Site | None:
    """The one statement that assigns to the name or attribute that an `if` tests by itself."""
    tree = syntax.tree(file)
    branch = next((n for n in (syntax.nodes(tree) if tree is not None else ()) if isinstance(n, ast.If) and n.lineno == line), None)
    if tree is None or branch is None:
        return None
    if isinstance(branch.test, ast.Attribute):
        made = sources.assignments(file, branch.test.attr)
        return made[0] if len(made) == 1 else None
    if isinstance(branch.test, ast.Name):
        scope = syntax.function_at(tree, line)
        values = reaching.given(scope).get(branch.test.id, []) or reaching.given(tree).get(branch.test.id, [])
        return (file, values[0].lineno, getattr(scope, "name", "")) if len(values) == 1 else None
    return None


def _site(file: str, call: ast.Call, trees: reaching.Trees) -> sites.Site:
    return (file, call.lineno, getattr(syntax.function_at(dict(trees)[file], call.lineno), "name", ""))


def arm() -> None:
    at_close.append(quiet(tell))
