"""OUT104 two-writers-one-log-dir: several ranks keep a TensorBoard event file in one folder.

What it does
    Looks for event files (`events.out.tfevents.*`) that different ranks open in one folder.

Why it is bad
    TensorBoard takes all files of a folder for one run: the curves of the ranks are drawn over each other as a zigzag, and a reader that
    follows the newest file loses the others.

Wrong
    writer = SummaryWriter("runs/a")                     # on every rank

Right
    writer = SummaryWriter("runs/a") if rank == 0 else None

Known limits
    Ranks on different nodes may have a disk each: only those of one node are compared. A folder a rank is healthy.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.checks.order import Clocks
from harness.checks.out import event_files
from harness.model import Finding, Severity
from harness.record import Run


class TwoWritersOneLogDir(Check):
    code = "OUT104"
    name = "two-writers-one-log-dir"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        writers = event_files.writers(run)
        if len(run.present) < 2 or not writers:
            raise NotApplicable("no event file is written by a job of several ranks")
        clocks = Clocks(run)
        for folder, group in writers.items():
            ranks = sorted({rank for rank, _ in group})
            if len(ranks) > 1 and all(clocks.same_host(ranks[0], rank) for rank in ranks):
                yield self.finding(
                    f"{len(ranks)} ranks write TensorBoard event files into {files.short(folder)}",
                    where=group[0][1].where,
                    ranks=ranks,
                    notes=[f"{len(group)} files, for example {files.name(str(group[0][1]['path']))}"],
                    help="make the SummaryWriter under `if rank == 0:` only",
                    evidence={"folder": folder, "files": len(group)},
                )
                return
