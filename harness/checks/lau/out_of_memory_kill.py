"""LAU103 out-of-memory-kill: the kernel ended a rank because memory ran out.

What it does
    A rank ended by SIGKILL that we did not send, and the kernel's counter of out-of-memory kills (of the control group or the host) rose
    while another rank looked on, or the output says so. An error.

Why it is bad
    SIGKILL leaves no traceback; the other ranks report lost connections or hang. Host memory is shared by all ranks of a node and by
    their loader workers: N ranks with W workers each hold N x (W + 1) copies of what a worker loads.

Wrong
    dataset = [load(path) for path in paths]      # whole, in every rank and worker

Right
    class Lazy(Dataset): ...                      # load in __getitem__, or map one file that all processes share

Known limits
    The counter is that of the whole host: where another job's process was killed for want of memory during this run, and a rank of this
    one was killed by somebody else, the two are taken for one.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame, oom
from harness.model import Finding, Severity
from harness.record import Run


class OutOfMemoryKill(Check):
    code = "LAU103"
    name = "out-of-memory-kill"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU102", "LAU122", "LAU124", "MEM103", "MEM104")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live:
            raise NotApplicable("the run has not ended")
        fall = blame.culprit(run)
        evidence = oom.killed(run, fall) if fall is not None else None
        if fall is None and oom.slurm_says(run):
            yield self.finding(
                "Slurm ended the job because it used more memory than it had asked for; which rank it was is not in the recording",
                notes=["Slurm ended the job as OUT_OF_MEMORY"],
                help="ask for more with --slurm mem=SIZE, or lower what each process holds",
            )
        if fall is None or evidence is None:
            return
        seen = oom.last_rss_bytes(run, fall.rank)
        size = f" at {seen / 2**30:.1f} GiB resident" if seen else ""
        yield self.finding(
            f"rank {fall.rank} was killed by the kernel because memory ran out{size}",
            where=fall.where,
            ranks=[fall.rank],
            notes=[evidence, *blame.others(run, fall)],
            help="lower what each process holds: fewer loader workers, a lazy dataset, a smaller batch; see the memory "
            "findings and figures",
        )
