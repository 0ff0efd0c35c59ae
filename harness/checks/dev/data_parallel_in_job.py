"""DEV104 data-parallel-in-job: nn.DataParallel inside a job of several processes.

What it does
    A rank of a job with more than one process builds torch.nn.DataParallel. A warning.

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
from harness.record import Run


class DataParallelInJob(Check):
    code = "DEV104"
    name = "data-parallel-in-job"
    severity = Severity.WARNING
    substantial = False
    explains = ("LAU111", "SYN126", "MEM104", "DEV102", "SYN101")

    def end(self, run: Run) -> Iterable[Finding]:
        made = list(run.events("data_parallel"))
        if not made:
            raise NotApplicable("nn.DataParallel was not used")
        if run.world_size < 2:
            raise NotApplicable("the job has one process")
        if any(any(True for _ in (recording.of("wrap"))) for recording in run.present):
            severity, note = Severity.WARNING, "the job wraps a model in DistributedDataParallel as well"
        else:
            severity, note = (
                Severity.ERROR if _trains(run) else Severity.WARNING,
                "no rank wraps its model in DistributedDataParallel: replicas are not averaged",
            )
        event = made[0][1]
        ids = event["device_ids"] if isinstance(event["device_ids"], list) else []
        yield self.finding(
            f"nn.DataParallel in a job of {run.world_size} processes",
            where=event.where,
            ranks=sorted({rank for rank, _ in made}),
            severity=severity,
            notes=[note, f"device_ids {ids}" if ids else "no GPU: it only passes through"],
            help="wrap the model in `DistributedDataParallel(model)` instead, one process a device",
        )


def _trains(run: Run) -> bool:
    return run.num_steps > 0
