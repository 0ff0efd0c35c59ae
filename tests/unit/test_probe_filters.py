"""What a script leaves out by name, read from its source."""

from __future__ import annotations

import ast

import pytest

from harness.probe.sensors import filters


@pytest.mark.parametrize(
    "source, texts",
    [
        ('shared = [p for n, p in named if "head" not in n]', {"head"}),
        ('shared = [p for n, p in named if not n.startswith("head.")]', {"head."}),
        ('shared = [p for n, p in named if not n.startswith(("head.", "bn"))]', {"head.", "bn"}),
        ('shared = [p for n, p in named if not any(k in n for k in ("bn", "norm"))]', {"bn", "norm"}),
        ('for n, p in named:\n    if "head" in n:\n        continue\n    sync(p)', {"head"}),
        ('heads = [p for n, p in named if "head" in n]', set()),
        ("shared = [p for n, p in named if n not in private]", set()),
        ('if name.startswith("head"):\n    p.requires_grad = False', set()),
    ],
)
def test_excluded(source: str, texts: set[str]) -> None:
    assert filters.excluded(ast.parse(source)) == texts
