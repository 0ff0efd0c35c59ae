"""OUT106 event-file-half-written: a TensorBoard event file ends in the middle of a record, and its writer has gone.

What it does
    Where the script opens an event file, the files of earlier writers in that folder are walked record by record, and its own at the end.

Why it is bad
    Readers stop at the torn record: what the run wrote last is not shown, and some tools refuse the file.

Wrong
    writer = SummaryWriter("runs/a")          # and the process is killed, or ends by os._exit, before a flush

Right
    with SummaryWriter("runs/a") as writer:   # closed on an exception too
        ...

Known limits
    Files of more than 20,000 records are walked in part.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.checks.out import event_files
from harness.model import Finding, Severity
from harness.record import Run, number


class EventFileHalfWritten(Check):
    code = "OUT106"
    name = "event-file-half-written"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        torn = {str(e["path"]): (rank, e) for rank, e in run.events("event_file")}
        writers = event_files.writers(run)
        if not writers and not torn:
            raise NotApplicable("no event file is written or read")
        for path, (rank, event) in torn.items():
            near = writers.get(path.rpartition("/")[0], [])
            yield self.finding(
                f"{files.name(path)} ends in the middle of a record",
                where=near[0][1].where if near else None,
                ranks=(rank,),
                notes=[f"the record at byte {event['torn_at']} of {number(event['size'])} is cut off, its writer has ended"],
                help="close or flush the writer before the process ends; move the broken file out of the folder",
            )
