"""OUT102 every-rank-prints: every rank prints the same line again and again, and no line says which rank it comes from.

What it does
    Compares what the ranks print, or log to the terminal, at one statement. Lines that differ in their numbers only count as the same. A
    warning where it happens at least twice on every rank; once is advice, and so is a listing (of settings, of classes) between two steps.

Why it is bad
    With 64 ranks each line comes 64 times, interleaved. The numbers are those of one shard each, and nobody knows of which.

Wrong
    print(f"epoch {epoch}: loss {loss.item():.4f}")

Right
    if rank == 0:
        print(f"epoch {epoch}: loss {mean_loss:.4f}")       # after an all_reduce

Known limits
    A line with a rank, process id or host in it is healthy, and so is a whole number that tells the ranks apart. A rank that sends its
    stdout to /dev/null is silent. Progress bars are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.out import lines
from harness.model import Finding, Severity
from harness.record import Run


class EveryRankPrints(Check):
    code = "OUT102"
    name = "every-rank-prints"
    severity = Severity.WARNING
    substantial = False  # a script that trains nothing prints and has threads too

    def end(self, run: Run) -> Iterable[Finding]:
        ranks = [rank for rank, recording in enumerate(run.ranks) if recording is not None]
        if len(ranks) < 2:
            raise NotApplicable("one rank")
        said = lines.spoken(run)
        if not said:
            raise NotApplicable("nothing is printed")
        found = [(num, text, one) for one in said if (pair := one.repeated(ranks))[0] for num, text in [pair]]
        if not found:
            return
        num, text, one = max(found, key=lambda f: (self._recurs(run, f[2]), f[0]))
        others = [f"line {o.where.line}: {n} times" for n, _, o in found if o is not one and o.where is not None]
        yield self.finding(
            f"all {len(ranks)} ranks print the same line" + (f" {num} times, none says which rank it is" if num > 1 else ""),
            where=one.where,
            ranks=ranks,
            notes=[f"for example: {text.strip()[:100]}", *(["also " + ", ".join(others[:5])] if others else [])],
            help="print under `if rank == 0:`, or begin the line with the rank",
            severity=None if num > 1 and self._recurs(run, one) else Severity.ADVICE,
            evidence={"times": num, "statements": len(found)},
        )

    @staticmethod
    def _recurs(run: Run, one: lines.Spoken) -> bool:
        """It speaks again as the training goes on; where no step was seen, it may."""
        return run.num_steps == 0 or any(len(steps) > 1 for steps in one.steps.values())
