"""DEV103 device-ids-mismatch: the device_ids given to DistributedDataParallel are not where the module lives.

What it does
    Names the constructor that raised because of device_ids (a CPU module, a module on several devices, another device), and a wrap whose
    device_ids is another device than the module's parameters. An error.

Why it is bad
    On CPU the constructor raises on every rank. On GPUs a wrong id copies every batch to a device that belongs to another rank.

Wrong
    model = DDP(net, device_ids=[local_rank])            # net is on the CPU

Right
    model = DDP(net, device_ids=[local_rank] if device.type == "cuda" else None)

Known limits
    device_ids of modules that are split over devices must be None; the constructor says so itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Event, Run

RAISED = re.compile(
    r"device_ids.*(cpu|gpu|module|device)|output_device.*(cpu|gpu|module)|invalid device ordinal", re.IGNORECASE | re.DOTALL
)


class DeviceIdsMismatch(Check):
    code = "DEV103"
    name = "device-ids-mismatch"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        raised = [(rank, e) for rank, _, e in blame.failures(run) if _by_device_ids(e)]
        wrong = [(rank, e) for rank, e in run.events("wrap") if _elsewhere(e)]
        if not raised and not wrong:
            if not any(True for _ in run.events("wrap")):
                raise NotApplicable("nothing was wrapped in DistributedDataParallel")
            return
        if raised:
            event = min((e for _, e in raised), key=lambda e: e.t_ns)
            text = str(event["message"])
            on_cpu = "device(type='cpu')" in text or "cpu" in text.lower()
            message = (
                "DistributedDataParallel was given device_ids for a module on the CPU"
                if on_cpu
                else f"DistributedDataParallel refused its device_ids: {text[:160]}"
            )
            notes = [text.splitlines()[0][:400]] if text else []
            ranks = sorted({rank for rank, _ in raised})
        else:
            event = wrong[0][1]
            message = f"device_ids is {_ids(event)}, the module's parameters are on {', '.join(map(str, event['devices']))}"
            notes, ranks = [], sorted({rank for rank, _ in wrong})
        yield self.finding(
            message,
            where=event.where,
            ranks=ranks,
            notes=notes,
            help='pass `device_ids=[local_rank] if device.type == "cuda" else None`, with the device that the module was moved to',
        )


def _by_device_ids(event: Event) -> bool:
    return "device_ids" in str(event["message"]) and bool(RAISED.search(str(event["message"])))


def _ids(event: Event) -> list[str]:
    ids = event["device_ids"]
    return [str(i) for i in ids] if isinstance(ids, list) else []


def _elsewhere(event: Event) -> bool:
    """One id, and parameters on one GPU with another index."""
    ids, devices = _ids(event), event["devices"]
    if len(ids) != 1 or not isinstance(devices, list) or len(devices) != 1 or not str(devices[0]).startswith("cuda:"):
        return False
    return ids[0].rpartition(":")[2] != str(devices[0]).rpartition(":")[2]
