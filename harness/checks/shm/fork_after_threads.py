"""SHM102 fork-after-threads: a process was forked after its parent had used several threads, and hangs in its first parallel operation.

What it does
    Looks at the number of threads of the parent when it forks. Where the run hung and a forked child has not taken a step, that is the
    cause.

Why it is bad
    fork copies one thread. The pool of OpenMP threads, which the child believes it has, does not exist there: the first matmul waits for
    it for ever.

Wrong
    evaluate(model)                                  # uses all threads
    mp.Process(target=train, args=(model,)).start()  # fork

Right
    torch.set_num_threads(1)                         # first of all in the parent
    # or: mp.get_context("spawn").Process(...)

Known limits
    Without a hang it is advice, and only where training processes were forked by a parent with more than one thread that had run
    something before.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.shm import workers
from harness.model import Finding, Severity
from harness.record import Run, number, where_of


class ForkAfterThreads(Check):
    code = "SHM102"
    name = "fork-after-threads"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU122", "LAU124", "PRF104")

    def end(self, run: Run) -> Iterable[Finding]:
        teams = workers.teams(run)
        if not teams:
            raise NotApplicable("the script starts no process of its own")
        forked = [(t, w) for t in teams for w in t.workers if w.method == "fork" and number(w.started["threads"]) > 1]
        if not forked:
            return
        hung = run.ending.reason in ("hang", "timeout")
        stuck = [(t, w) for t, w in forked if not w.steps and (w.joined is None or w.joined["exitcode"] is None)]
        if hung and stuck:
            team, worker = stuck[0]
            yield self.finding(
                f"{len(stuck)} forked processes hang before their first step: their parent had used {worker.started['threads']} threads",
                where=where_of(worker.started["threads_at"]) or worker.where,
                ranks=(team.rank,),
                notes=[f"{worker.started['os_threads']} threads ran in the parent at the fork; a child keeps one of them"],
                help="call `torch.set_num_threads(1)` before anything is computed in the parent, or start the processes by spawn",
                evidence={"threads": worker.started["threads"], "stuck": len(stuck)},
            )
        elif number(forked[0][1].started["os_threads"]) > number(forked[0][1].started["threads"]):
            team, worker = forked[0]
            yield self.finding(
                f"processes are forked while the parent runs {worker.started['os_threads']} threads",
                where=worker.where,
                ranks=(team.rank,),
                notes=["a child that meets the parent's thread pool in a parallel operation hangs; this time none did"],
                help="call `torch.set_num_threads(1)` before anything is computed in the parent, or start the processes by spawn",
                severity=Severity.ADVICE,
            )
