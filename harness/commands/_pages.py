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
    title: str  # the first paragraph of the docstring, in one line
    explains: tuple[str, ...]
    body: str

    @property
    def text(self) -> str:
        """The page as the terminal shows it."""
        folds = f"Folds under itself, where it fires: {', '.join(self.explains)}\n" if self.explains else ""
        return f"{self.severity}[{self.code}] {self.name}: {self.title}\n{folds}\n{self.body}"


def all_pages() -> list[Page]:
    """Ordered by code."""
    pages = []
    for check in all_checks():
        title, body = split_title(inspect.cleandoc(sys.modules[check.__module__].__doc__ or "no page yet"))
        title = title.removeprefix(f"{check.code} {check.name}:").removeprefix(f"{check.code}:").strip()
        pages.append(Page(check.code, check.name, check.severity.word, title, tuple(check.explains), body))
    return sorted(pages)


def split_title(docstring: str) -> tuple[str, str]:
    """The first paragraph as one line, and the rest."""
    first, _, rest = docstring.partition("\n\n")
    return " ".join(first.split()), rest.strip("\n")
