"""Silencing a finding: `# harness: ignore[DAT101]` on the line it points to, or `--ignore`. One that silences nothing is reported.

A comment on its own line counts for the next line of code. The script's comments are read when the plan is made; those in other files
come with the finding, whose line the rank itself read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.model import Finding, Outcome, OutcomeKind

COMMENT = re.compile(r"#\s*harness:\s*ignore\[([\w\s,.-]*)\]")


@dataclass(frozen=True)
class Comment:
    """One suppression comment of the script: the line that it speaks of, and the codes or names in it."""

    line: int
    words: tuple[str, ...]


@dataclass(frozen=True)
class Silenced:
    """What was taken out, and which suppressions took out nothing."""

    outcomes: tuple[Outcome, ...]
    findings: tuple[Finding, ...]
    silenced: tuple[Finding, ...]
    unused: tuple[str, ...]


def words_of(text: str) -> tuple[str, ...]:
    return tuple(word for match in COMMENT.finditer(text) for word in re.split(r"[,\s]+", match[1]) if word)


def comments_in(source: str) -> tuple[Comment, ...]:
    if "harness:" not in source:
        return ()
    lines = source.splitlines()
    found = []
    for number, line in enumerate(lines, 1):
        words = words_of(line)
        if words:
            found.append(Comment(_line_meant(lines, number), words))
    return tuple(found)


def _line_meant(lines: Sequence[str], number: int) -> int:
    """The line itself, or, where nothing but the comment stands on it, the next line of code."""
    while number < len(lines) and lines[number - 1].lstrip().startswith("#"):
        number += 1
    return number


def names_finding(word: str, finding: Finding) -> bool:
    return word.upper() == finding.code or word.lower() == finding.name or (len(word) >= 3 and finding.code.startswith(word.upper()))


def apply(
    outcomes: Sequence[Outcome], findings: Sequence[Finding], script: str, comments: Sequence[Comment], ignored: Mapping[str, Sequence[str]]
) -> Silenced:
    """Take out what a comment or `--ignore` silences. `ignored`: each word of `--ignore` with its codes."""
    used: set[object] = set()
    kept: list[Finding] = []
    silenced: list[Finding] = []
    for finding in findings:
        reasons: list[tuple[object, ...]] = [("--ignore", word) for word, codes in ignored.items() if finding.code in codes]
        reasons += [("line", c.line, w) for c in comments for w in c.words if _speaks_of(c, w, finding, script)]
        reasons += [("text", w) for w in words_of(finding.where.text if finding.where else "") if names_finding(w, finding)]
        used.update(reasons)
        (silenced if reasons else kept).append(finding)
    unused = [f"--ignore {word}" for word in ignored if ("--ignore", word) not in used]
    unused += [f"{Path(script).name}:{c.line} ignore[{w}]" for c in comments for w in c.words if ("line", c.line, w) not in used]
    codes = {code for of_word in ignored.values() for code in of_word}
    return Silenced(tuple(_deselected(o, codes) for o in outcomes), tuple(kept), tuple(silenced), tuple(unused))


def _speaks_of(comment: Comment, word: str, finding: Finding, script: str) -> bool:
    where = finding.where
    return where is not None and where.line == comment.line and Path(where.file).name == Path(script).name and names_finding(word, finding)


def _deselected(outcome: Outcome, codes: set[str]) -> Outcome:
    if outcome.code not in codes:
        return outcome
    return Outcome(outcome.code, outcome.name, OutcomeKind.DESELECTED, "--ignore")
