"""Lines that ranks print or log to the terminal, and whether they say which rank they come from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.model import Where
from harness.record import Run

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WHOLE = re.compile(r"(?<![\d.])\d+(?![\d.])")
_TAG = re.compile(
    r"rank(?!ing|ed)|\bpid\b|\bhost|\bworker\b|\bprocess\b|\bproc\b|cuda:\d|\bgpu ?:?\d|\bnode\b|\bshard\b|%\((process|hostname|rank)",
    re.IGNORECASE,
)
FORMAT = "\x1f"  # then the handler's format, which may name the rank
CHATTY = ("INFO", "DEBUG")  # a warning of every rank may be one that each rank has to give


@dataclass
class Spoken:
    """One statement: what each rank said there."""

    where: Where | None
    texts: dict[int, list[str]] = field(default_factory=dict)
    steps: dict[int, set[int]] = field(default_factory=dict)  # optimizer steps taken when it spoke

    def repeated(self, ranks: Sequence[int]) -> tuple[int, str]:
        """(how often every rank said the same line but for its numbers, an example); (0, "") where none did, or the line names the rank."""
        if any(rank not in self.texts for rank in ranks):
            return 0, ""
        counts = [Counter(mask(t) for t in self.texts[rank]) for rank in ranks]
        common = [(min(c[line] for c in counts), line) for line in counts[0] if line.strip() and all(line in c for c in counts)]
        common = [(num, line) for num, line in common if not self._tagged(line, ranks)]
        if not common:
            return 0, ""
        line = max(common)[1]
        return sum(num for num, _ in common), next(t for t in self.texts[ranks[0]] if mask(t) == line).split(FORMAT)[0]

    def _tagged(self, line: str, ranks: Sequence[int]) -> bool:
        """A word such as "rank", or a whole number at one place that is always the same on a rank and differs between ranks."""
        mine = {rank: [_WHOLE.findall(t) for t in self.texts[rank] if mask(t) == line] for rank in ranks}
        if _TAG.search(line):
            return True
        width = min(len(numbers) for found in mine.values() for numbers in found)
        for place in range(width):
            values = [{numbers[place] for numbers in mine[rank]} for rank in ranks]
            if all(len(v) == 1 for v in values) and len(set.union(*values)) == len(ranks):
                return True
        return False


def mask(text: str) -> str:
    return _NUMBER.sub("#", text)


def spoken(run: Run) -> list[Spoken]:
    """Statements that print or log to the terminal, in order of first use."""
    table: dict[tuple[str, int], Spoken] = {}
    for kind in ("print", "log"):
        for rank, event in run.events(kind):
            where = event.where
            if where is None or (kind == "log" and not (event["console"] and event["level"] in CHATTY)):
                continue
            text = f"{event['text'] or ''}{FORMAT}{event['format'] or ''}" if kind == "log" else str(event["text"] or "")
            spoken = table.setdefault((where.file, where.line), Spoken(where))
            spoken.texts.setdefault(rank, []).append(text)
            spoken.steps.setdefault(rank, set()).add(event.step)
    return list(table.values())


def decimals(text: str) -> list[tuple[float, float]]:
    """(number, half of its last digit) of the numbers with a fraction in a line."""
    found: list[tuple[float, float]] = []
    for token in _NUMBER.findall(text):
        head, dot, tail = token.partition(".")
        digits = len(tail) if tail.isdigit() else 0
        if dot and digits >= 3 and head.lstrip("+-").isdigit():
            found.append((float(token), 0.5 * 10**-digits))
    return found
