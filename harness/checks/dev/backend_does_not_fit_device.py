"""DEV109 backend-does-not-fit-device: the process group's backend cannot serve the devices that are used.

What it does
    NCCL without a GPU, a collective on a tensor for whose device the group has no backend (errors), or gloo for parameters on GPUs where
    each rank has a GPU of its own (a warning).

Why it is bad
    NCCL fails at once or at the first collective on a CPU tensor. Gloo copies every gradient through host memory: correct, and many times
    slower.

Wrong
    dist.init_process_group("nccl")               # no GPU here
    dist.init_process_group("gloo")               # model on cuda

Right
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group("cpu:gloo,cuda:nccl")     # both

Known limits
    Backends other than gloo, nccl and mpi are not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dev import tables
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Event, Run

RAISED = re.compile(
    r"ProcessGroupNCCL is only supported with GPUs|no GPUs found|no backend type associated with device type|backend nccl does not support"
    r"|distributed package doesn't have NCCL|tensors must be CUDA and dense|must be CUDA tensor|nccl.*built.?in|backend.*not available"
    r"|invalid backend",
    re.IGNORECASE,
)


class BackendDoesNotFitDevice(Check):
    code = "DEV109"
    name = "backend-does-not-fit-device"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU113", "HNG*", "LAU121")

    def end(self, run: Run) -> Iterable[Finding]:
        groups = [(rank, e) for rank, e in run.events("pg")]
        if not groups:
            raise NotApplicable("no process group")
        raised = [(rank, e) for rank, _, e in blame.failures(run) if RAISED.search(str(e["message"]))]
        if raised:
            event = min((e for _, e in raised), key=lambda e: e.t_ns)
            call = groups[-1][1]
            text = str(event["message"]).splitlines()
            yield self.finding(
                f"the backend {_backend(call) or 'of the process group'} does not fit the device: "
                f"{text[0][:200] if text else event['type']}",
                where=call.where or event.where,
                ranks=sorted({rank for rank, _ in raised}),
                notes=[f"raised at {event.where.place}"] if event.where is not None else [],
                help='choose it by the device: `dist.init_process_group("nccl" if device.type == "cuda" else "gloo")`',
            )
            return
        yield from self._slow(run, groups)

    def _slow(self, run: Run, groups: list[tuple[int, Event]]) -> Iterable[Finding]:
        gloo = [e for _, e in groups if e["done"] and str(e["backend"]) == "gloo"]
        on_gpu = [e for _, e in run.events("wrap") if any(str(d).startswith("cuda") for d in e["devices"] or ())]
        if not gloo or not on_gpu or run.world_size < 2:
            return
        found = tables.used(run)
        if len({one.uuid for one in found}) < len(found):
            return  # ranks share a GPU: nccl would refuse
        yield self.finding(
            "gloo carries the gradients of a model on GPUs: every one goes through host memory",
            where=gloo[0].where,
            ranks=[one.rank for one in found],
            severity=Severity.WARNING,
            notes=tables.note(found),
            help='use `dist.init_process_group("nccl")`, or "cpu:gloo,cuda:nccl" for both',
        )


def _backend(event: Event) -> str:
    asked = event["asked"]
    return str(event["backend"] or (asked.get("backend") if isinstance(asked, dict) else "") or "")
