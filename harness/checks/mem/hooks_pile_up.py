"""MEM106 hooks-pile-up: one statement registers a hook again and again on the same module, and none is removed

What it does
    Follows the hooks that the script registers after its first optimizer step. Four and more of one statement that stand on one module or
    tensor at the same time, registered in four different steps, are a warning at that statement.

Why it is bad
    All old hooks still run: each forward does the work again for every look there ever was, and what they collect is never freed. A hook
    that changes what it sees changes it many times over.

Wrong
    def look(x):
        layer.register_forward_hook(keep)
        model(x)

Right
    def look(x):
        handle = layer.register_forward_hook(keep)
        try:
            model(x)
        finally:
            handle.remove()

Known limits
    Hooks that are registered through a library's helper are not followed.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run

MIN_STEPS = 4


class HooksPileUp(Check):
    code = "MEM106"
    name = "hooks-pile-up"
    severity = Severity.WARNING
    explains = ("MEM101", "MEM103", "MEM104", "MEM105", "PRF10*")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.num_rows for r in run.processes):
            raise NotApplicable("no process took an optimizer step")
        found = [(rank, e) for rank, e in run.events("hooks") if e["steps"] >= MIN_STEPS and e.where is not None]
        if not found:
            return
        _, worst = max(found, key=lambda item: item[1]["num"])
        yield self.finding(
            f"{worst['num']} hooks of this statement stand on one module or tensor: none is removed, and all of them run",
            where=worst.where,
            ranks=sorted({rank for rank, e in found if e.where == worst.where and rank >= 0}),
            notes=[f"registered in {worst['steps']} different steps"],
            help="keep the handle that the registration returns and call `handle.remove()` when done",
        )
