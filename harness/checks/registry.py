"""Finds every check: one subclass of Check in each file of each family folder. There is no list to edit."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

import harness.checks as package
from harness.checks.base import Check


@cache
def all_checks() -> tuple[type[Check], ...]:
    """The check classes, by code."""
    found: dict[str, type[Check]] = {}
    for family in pkgutil.iter_modules(package.__path__):
        if not family.ispkg:
            continue
        folder = importlib.import_module(f"{package.__name__}.{family.name}")
        for info in pkgutil.iter_modules(folder.__path__):
            module = importlib.import_module(f"{folder.__name__}.{info.name}")
            for value in vars(module).values():
                if inspect.isclass(value) and issubclass(value, Check) and value.__module__ == module.__name__ and hasattr(value, "code"):
                    if value.code in found:
                        raise ValueError(f"{value.code} is defined in {found[value.code].__module__} and in {module.__name__}")
                    found[value.code] = value
    return tuple(found[code] for code in sorted(found))


def page(check: type[Check]) -> str:
    """The page of a check: its module's docstring."""
    return inspect.getdoc(inspect.getmodule(check)) or ""
