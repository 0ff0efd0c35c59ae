"""The page of each check: the docstring of its file, with a head that names code, severity and what it folds."""

from __future__ import annotations

import inspect
import sys
from typing import NamedTuple

from harness.checks.registry import all_checks


class Page(NamedTuple):
    code: str
    name: str
    severity: str
    title: str  # the first line of the docstring
    explains: tuple[str, ...]
    body: str

    @property
    def text(self) -> str:
        """The page as the terminal shows it."""
        return f"{self.code} {self.name} ({self.severity})\n\n{self.body}"


def all_pages() -> list[Page]:
    """Ordered by code."""
    pages = []
    for check in all_checks():
        body = inspect.cleandoc(sys.modules[check.__module__].__doc__ or "no page yet")
        title = body.splitlines()[0] if body else ""
        pages.append(Page(check.code, check.name, check.severity.word, title, tuple(check.explains), body))
    return sorted(pages)
