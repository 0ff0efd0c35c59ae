"""CKP119 latest-by-name: the checkpoint that is resumed from is the last by the order of names, not by the number in them.

What it does
    Looks at the files beside a checkpoint that training goes on from: those whose names differ in numbers only. A finding where the loaded one
    is the last of them in the order of letters, another one has a higher number and was written later, and the script sorts the names of a folder.

Why it is bad
    "step-80" comes after "step-120" in the order of letters. Every resume goes back, trains the same steps again and writes over newer files.

Wrong
    path = sorted(folder.glob("step-*.pt"))[-1]

Right
    path = max(folder.glob("step-*.pt"), key=lambda p: int(p.stem.split("-")[1]))        # or names with zeros: f"step-{step:07d}.pt"

Known limits
    Silent where the file is named on the command line, where its name is made from a number (the best epoch's), and where neither the optimizer
    is restored nor epochs or steps count on from the file: a model that is only measured, or that fine-tuning starts from.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files, goes_on
from harness.model import Finding, Severity
from harness.record import Run


class LatestByName(Check):
    code = "CKP119"
    name = "latest-by-name"
    severity = Severity.ERROR
    explains = ("DAT112",)  # the epochs of the older file are trained again

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [load for load in files.loads(run) if load.ok]
        if not loads:
            raise NotApplicable("nothing is loaded with torch.load")
        hit = [load for load in loads if load.begin["newest"] and _resumed(run, load)]
        if hit:
            yield self._found(hit)

    def _found(self, hit: list[files.Load]) -> Finding:
        one = hit[0]
        return self.finding(
            f"training goes on from {files.name(one.path)}, although {one.begin['newest']} was written later: names were sorted as text",
            where=one.begin.where,
            ranks=sorted({load.rank for load in hit if load.begin.where == one.begin.where}),
            notes=["by letters it is the last of these files, by number it is not"],
            help="compare the numbers (`max(paths, key=lambda p: int(...))`), or write them with leading zeros",
        )


def _resumed(run: Run, load: files.Load) -> bool:
    recording, end = run.ranks[load.rank], load.end
    if recording is None or end is None or files.steps_after(recording, load.begin) == 0:
        return False
    restored = any(e["source"] == load.path and e.t_ns > end.t_ns for e in recording.of("load_optimizer"))
    return restored or bool(goes_on.counted_on(run, recording, load))
