"""The user's source as syntax: parsed once a file, walked once a scope."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest

from harness.probe import cuts, sources, syntax

SOURCE = """\
import torch
keep = lambda x: [x]
def outer(a):
    for b in a:
        def inner(c):
            return c
        inner(b)
class Model:
    def forward(self, x):
        return x
"""


def module(tmp_path: Path) -> ast.Module:
    path = tmp_path / "train.py"
    path.write_text(SOURCE)
    tree = syntax.tree(str(path))
    assert tree is not None and tree is syntax.tree(str(path))
    return tree


def test_the_innermost_function_holds_a_line(tmp_path: Path) -> None:
    tree = module(tmp_path)
    held = {line: getattr(syntax.function_at(tree, line), "name", "<module>") for line in (2, 4, 6, 7, 10)}
    assert held == {2: "<module>", 4: "outer", 6: "inner", 7: "outer", 10: "forward"}


def test_a_scope_leaves_out_functions_and_classes_inside_it_but_not_lambdas(tmp_path: Path) -> None:
    tree = module(tmp_path)
    own = syntax.own_nodes(tree)
    assert any(isinstance(n, ast.Lambda) for n in own) and any(isinstance(n, ast.List) for n in own)
    assert not any(isinstance(n, (ast.Return, ast.For)) for n in own)
    assert sum(isinstance(n, ast.Return) for n in syntax.nodes(tree)) == 2


def test_no_source_and_source_that_is_none_have_no_tree(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert syntax.tree(str(tmp_path / "broken.py")) is syntax.tree(str(tmp_path / "missing.py")) is None


def test_modules_of_the_user_are_found_below_a_package_without_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A namespace package has no file; torch's 2,500 modules are passed over by their top alone."""
    space, part = ModuleType("space_xy"), ModuleType("space_xy.part")
    part.__file__ = str(tmp_path / "part.py")
    monkeypatch.setitem(sys.modules, "space_xy", space)
    monkeypatch.setitem(sys.modules, "space_xy.part", part)
    found = cuts.user_files()
    assert str(tmp_path / "part.py") in found
    assert not any("site-packages" in name for name in found)


LOOP = """\
def train(loader, optimizer, schedule, scaler):
    for i, loss in enumerate(loader):
        loss.backward()
        schedule.step()
        if (i + 1) % 8 == 0:
            {step}
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("step", "line"), [("optimizer.step()", 5), ("scaler.step(optimizer)", 5), ("schedule.step()", None)])
def test_the_condition_of_the_step_behind_a_backward(tmp_path: Path, step: str, line: int | None) -> None:
    path = tmp_path / "loop.py"
    path.write_text(LOOP.format(step=step))
    found = sources.step_condition(str(path), 3)
    assert (found[1] if found else None) == line


def test_a_step_without_a_condition_is_the_call_itself(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text("loss.backward()\nopt.step()\n")
    assert sources.step_condition(str(path), 1) == (str(path), 2, "")
