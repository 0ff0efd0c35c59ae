"""The built-in scenarios, one line each, without TOML, dataclasses or pathlib: these would double the cost of `harness list`.

Reads only what a listing shows, from headers that are our own; a test holds it equal to what `catalog` reads with a real TOML parser.
"""

# ruff: noqa: PTH112, PTH118, PTH120, PTH208  (pathlib costs 17 ms where everything else here costs 2)

from __future__ import annotations

import os

HEAD_BYTES = 4096  # of a script; the header stands at its top


def scenario_dir() -> str:
    """`harness/_scenarios` in an installed wheel, `scenarios/` of the source tree otherwise."""
    package = os.path.dirname(os.path.realpath(__file__))
    packaged = os.path.join(package, "_scenarios")
    return packaged if os.path.isdir(packaged) else os.path.join(os.path.dirname(package), "scenarios")


def names() -> list[str]:
    """Names of the built-in scenarios."""
    try:
        return sorted(n[:-3] for n in os.listdir(scenario_dir()) if n.endswith(".py") and not n.startswith("_"))
    except OSError:
        return []


def brief(name: str) -> tuple[int, str]:
    """(nproc, summary) of a built-in scenario."""
    with open(os.path.join(scenario_dir(), f"{name}.py"), encoding="utf-8", errors="replace") as file:
        head = file.read(HEAD_BYTES)
    table = head.partition("# [tool.harness]\n")[2].partition("# [")[0]
    values = dict(_assignment(line) for line in table.splitlines() if line.startswith("# ") and " = " in line)
    return int(values.get("nproc", "2")), values.get("summary", "")


def _assignment(line: str) -> tuple[str, str]:
    key, _, value = line[2:].partition(" = ")
    return key.strip(), value.strip().strip('"')


def glob_match(name: str, pattern: str) -> bool:
    if not any(c in pattern for c in "*?["):
        return name == pattern
    from fnmatch import fnmatchcase

    return fnmatchcase(name, pattern)
