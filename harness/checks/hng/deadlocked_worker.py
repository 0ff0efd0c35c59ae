"""HNG105 deadlocked-worker: a rank waits for its data loader, whose workers do not answer.

What it does
    In a run that stands still, a rank is inside the data loader and the loader has worker processes. An error.

Why it is bad
    Workers are forked: a lock that another thread of the parent held at that moment (a thread pool, a logger, an open database) stays
    locked in the child for ever. All other ranks wait in their next collective and look guilty.

Wrong
    cv2.setNumThreads(8)                                 # or a global h5py file, a connection, a thread pool
    DataLoader(dataset, num_workers=4)                   # forked with it

Right
    DataLoader(dataset, num_workers=4, multiprocessing_context="spawn")
    # or open files and pools in worker_init_fn

Known limits
    A worker that is merely slow for longer than the hang timeout looks the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.hng import waits
from harness.model import Finding, Severity
from harness.record import Run


class DeadlockedWorker(Check):
    code = "HNG105"
    name = "deadlocked-worker"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        found = waits.require_hang(run)
        stuck = [w for w in found if w.op == "data"]
        for wait in stuck:
            recording = run.ranks[wait.rank]
            loaders = recording.of("loader") if recording is not None else []
            workers = int(loaders[-1]["num_workers"] or 0) if loaders else 0
            if workers:
                yield self.finding(
                    f"rank {wait.rank} waits for {workers} loader worker{'s' if workers > 1 else ''} that do not answer",
                    where=wait.where or loaders[-1].where,
                    ranks=[w.rank for w in stuck],
                    notes=[waits.describe(found), *waits.notes(found)],
                    help='use num_workers=0 to see the error, then `multiprocessing_context="spawn"`, or open files and '
                    "thread pools in worker_init_fn",
                )
                return
