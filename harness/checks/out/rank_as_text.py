"""OUT108 rank-compared-as-text: a rank from the environment is compared with a number, which it never equals

What it does
    Looks in the script for a variable of the launcher that is read from the environment, not converted, and compared with an integer.

Why it is bad
    The environment holds text: "0" == 0 is false. What rank 0 alone should do (print, log, save) is done by nobody, or by everybody.

Wrong
    rank = os.environ.get("RANK", 0)
    if rank == 0: torch.save(...)          # never

Right
    rank = int(os.environ.get("RANK", 0))

Known limits
    A name that one file reads and another compares is not followed; a name that is assigned anything else as well, or is a parameter of
    some function, is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import told
from harness.checks.base import Check
from harness.model import Finding, Severity
from harness.record import Run


class RankAsText(Check):
    code = "OUT108"
    name = "rank-compared-as-text"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        found = told.of(run, "rank_text")
        if not found:
            return
        event = found[0][1]
        yield self.finding(
            f"`{event['name']}` is text ({event['value']!r}) and is compared with a number: never equal, on no rank",
            where=event.where,
            ranks=sorted({rank for rank, _ in found}),
            notes=[f"it comes from the environment variable {event['variable']}"],
            help=f'convert it where it is read: `int(os.environ["{event["variable"]}"])`, or ask dist.get_rank()',
        )
