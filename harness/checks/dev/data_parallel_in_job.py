"""DEV104 data-parallel-in-job: nn.DataParallel inside a job of several processes.

What it does
    A rank of a job with more than one process builds torch.nn.DataParallel. An error where several ranks train a model inside it, a
    warning where DistributedDataParallel wraps it, advice where one rank alone trains in it.

Why it is bad
    DataParallel splits one process's batch over the GPUs that this process sees. In a job of N processes each of them drives all GPUs,
    nothing is averaged between processes, outputs and their memory pile up on device 0, and state that is changed in forward is lost with
    the replicas.

Wrong
    torchrun --nproc-per-node 4 train.py
    model = nn.DataParallel(net)

Right
    model = DistributedDataParallel(net, device_ids=[local_rank])

Known limits
    On CPU DataParallel is a pass-through: there it costs nothing, but still averages nothing and puts `module.` before all names.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run, texts


class DataParallelInJob(Check):
    code = "DEV104"
    name = "data-parallel-in-job"
    severity = Severity.WARNING
    substantial = False
    explains = ("LAU111", "SYN101", "SYN114", "SYN126", "SYN127", "MEM104", "DEV102")

    def end(self, run: Run) -> Iterable[Finding]:
        made = list(run.events("data_parallel"))
        if not made:
            raise NotApplicable("nn.DataParallel was not used")
        if run.world_size < 2:
            raise NotApplicable("the job has one process")
        trained = {rank for rank, e in run.events("params") if "DataParallel" in texts(e["roots"])}
        wrapped = any(e["module"] == "DataParallel" for _, e in run.events("wrap"))
        if not trained and not wrapped:
            return  # built to compare, or to load a checkpoint
        ranks = sorted({rank for rank, _ in made})
        event = made[0][1]
        ids = texts(event["device_ids"])
        yield self.finding(
            f"nn.DataParallel in a job of {run.world_size} processes",
            where=event.where,
            ranks=ranks,
            severity=Severity.ERROR if len(trained) > 1 else None if wrapped else Severity.ADVICE,
            notes=[
                f"{len(trained)} ranks train a model in it: nothing is averaged between them"
                if trained
                else "no rank trains a model in it",
                f"device_ids {ids}" if ids else "no GPU: here it only passes through",
            ],
            help="wrap the model in `DistributedDataParallel(model)` instead, one process a device",
        )
