"""DEV101 device-shared-by-ranks: several ranks of one host train on one GPU while others stand idle.

What it does
    Compares (host, UUID of the current device) over the ranks. Equal for two ranks although the host has a GPU for each is an error.

Why it is bad
    All models, batches and contexts pile up on one device, which runs out of memory or shares its time, and NCCL refuses two ranks on one
    GPU or hangs.

Wrong
    device = torch.device("cuda")                       # device 0 on every rank

Right
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

Known limits
    More ranks than GPUs is DEV108. UUIDs of MIG slices count as devices of their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.dev import tables
from harness.checks.lau import blame
from harness.model import Finding, Severity, Where
from harness.record import Run


class DeviceSharedByRanks(Check):
    code = "DEV101"
    name = "device-shared-by-ranks"
    severity = Severity.ERROR
    explains = ("DEV102", "MEM104", "CKP108")

    def end(self, run: Run) -> Iterable[Finding]:
        for group in tables.by_host(tables.used(run)):
            sharing: dict[str, list[tables.Used]] = {}
            for one in group:
                sharing.setdefault(one.uuid, []).append(one)
            crowded = [same for same in sharing.values() if len(same) > 1]
            if not crowded or tables.num_gpus(group) < len(group):
                continue
            same = crowded[0]
            call = tables.chosen_at(same[-1])
            ranks = [one.rank for one in same]
            yield self.finding(
                f"{blame.plural(ranks)} use one GPU (device {same[0].current}) although the host has {tables.num_gpus(group)}",
                where=call.where if call is not None else _first_use(same[-1]),
                ranks=ranks,
                notes=[f"UUID {same[0].uuid}", *tables.note(group)],
                help='call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` before anything is put on a device',
            )
            return


def _first_use(one: tables.Used) -> Where | None:
    events = [*one.recording.of("wrap"), *one.recording.of("params")]
    return next((e.where for e in events if e.where is not None), None)
