"""HNG105 deadlocked-worker: a rank waits for processes of its own, which stand still.

What it does
    In a run that stands still, a rank is inside a data loader that has worker processes, or joins processes that the script made and that
    do not move either. An error, at the line of the worker where it is known.

Why it is bad
    Workers are forked: a lock that another thread of the parent held at that moment (a thread pool, a logger, an open database) stays
    locked in the child for ever. OpenMP's threads are such a pool: torch has used it where OMP_NUM_THREADS is not 1. All other ranks wait
    in their next collective and look guilty.

Wrong
    cv2.setNumThreads(8)                                 # or a global h5py file, a connection, a thread pool
    DataLoader(dataset, num_workers=4)                   # forked with it

Right
    DataLoader(dataset, num_workers=4, multiprocessing_context="spawn")
    # or open files and pools in worker_init_fn

Known limits
    A worker that is merely slow for longer than the hang timeout looks the same. Processes that are joined before their queue is read are told
    apart: a child that has put much into a queue does not end until that has been taken out.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.hng import waits
from harness.model import Finding, Severity
from harness.record import Event, Run, number

ONE_THREAD = (
    "start with OMP_NUM_THREADS=1 (torchrun sets it, a script that spawns its ranks itself does not), or call torch.set_num_threads(1) "
    "before anything is computed; else "
)


class DeadlockedWorker(Check):
    code = "HNG105"
    name = "deadlocked-worker"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if not (found := waits.require_hang(run)):
            return
        own = [w for w in waits.workers(run) if w.code is None]
        if own and len(own) == len(waits.workers(run)):
            joining = [w for w in found if w.op == "join" or not w.peers]
            many = len(own) > 1
            if unread := [w for w in own if w.flushing]:
                yield self._unread(run, unread, [w.rank for w in joining])
                return
            yield self.finding(
                f"{len(own)} worker process{'es' if many else ''} stand{'' if many else 's'} still in {_place(own[0])}",
                where=own[0].where,
                ranks=[w.rank for w in joining],
                notes=[waits.describe(found), *sorted({f"in {w.inner}() at {_place(w)}" for w in own})[:4]],
                help="look at what this line waits for: a lock that is not released, a barrier or queue that another process never reaches",
            )
            return
        stuck = [w for w in found if w.op == "data"]
        for wait in stuck:
            recording = run.ranks[wait.rank]
            loaders = recording.of("loader") if recording is not None else []
            workers = int(loaders[-1]["num_workers"] or 0) if loaders else 0
            if workers:
                threads = _threads(loaders[-1])
                what = f"{workers} loader workers that do not answer" if workers > 1 else "its loader worker, which does not answer"
                yield self.finding(
                    f"rank {wait.rank} waits for {what}",
                    where=wait.where or loaders[-1].where,
                    ranks=[w.rank for w in stuck],
                    notes=[waits.describe(found), *waits.notes(found), *threads],
                    help=(ONE_THREAD if threads else "")
                    + 'use num_workers=0 to see the error, then `multiprocessing_context="spawn"`, or open files and '
                    "thread pools in worker_init_fn",
                )
                return

    def _unread(self, run: Run, unread: list[waits.Worker], ranks: list[int]) -> Finding:
        """A child does not end before its queue has been read, and the parent does not read before the child has ended."""
        pids = {w.pid for w in unread}
        last = [e[-1] for process in run.processes if (e := [j for j in process.of("joining") if j["child"] in pids])]
        place = f" ({last[0].where.place})" if last and last[0].where is not None else ""
        many = len(unread) > 1
        return self.finding(
            f"{len(unread)} process{'es' if many else ''} wait{'' if many else 's'} at the exit until what {'they' if many else 'it'} put into a queue is taken "
            f"out, and {f'the parent waits for their end{place}' if last else 'nobody reads it'}",
            where=last[0].where if last else unread[0].where,
            ranks=ranks,
            notes=["a queue's pipe holds 64 KiB: a larger message needs its reader, small ones went through"],
            help="take all results out of the queue before the processes are joined",
        )


def _threads(loader: Event) -> list[str]:
    """What is known of threads at the fork: torch had begun to compute with several, and a child keeps only the one that forks."""
    told = loader["threads"]
    if not isinstance(told, dict) or told.get("method") != "fork" or min(number(told.get("torch")), number(told.get("process")) - 1) < 2:
        return []
    return [
        f"the workers were forked from a process that computes with {told['torch']} threads: the pool that they believe to have is not there"
    ]


def _place(worker: waits.Worker) -> str:
    return worker.where.place if worker.where is not None else "an unknown line"
