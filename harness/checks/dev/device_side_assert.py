"""DEV107 device-side-assert: a kernel on the GPU found a condition violated.

What it does
    Names the rank and the line at which "device-side assert triggered" surfaced, and what the kernel printed. An error.

Why it is bad
    Kernels run later than the line that launched them: the traceback shows some innocent line after it, and the context of this process
    is lost, so nothing more can be computed or inspected.

Wrong
    reading the traceback as it stands

Right
    CUDA_LAUNCH_BLOCKING=1 python train.py        # the traceback then names the line

Known limits
    Without CUDA_LAUNCH_BLOCKING the line is where it surfaced. Where the kernel's own words tell an index out of range, OPT118 takes its
    place.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Run


class DeviceSideAssert(Check):
    code = "DEV107"
    name = "device-side-assert"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU101", "LAU102", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live and not any(True for _ in blame.failures(run)):
            raise NotApplicable("no rank has failed so far")
        raised = [(rank, e) for rank, _, e in blame.failures(run) if "device-side assert" in str(e["message"])]
        if not raised:
            return
        rank, event = min(raised, key=lambda item: item[1].t_ns)
        said = [line.strip() for line in run.logs.get(rank, "").splitlines() if "Assertion" in line and "failed" in line]
        yield self.finding(
            f"a kernel of rank {rank} failed an assertion",
            where=event.where,
            ranks=sorted({r for r, _ in raised}),
            notes=[*(line[:300] for line in said[:2]), "the line is where it surfaced; the kernel was launched earlier"],
            help="run again with CUDA_LAUNCH_BLOCKING=1 to see the line that launched the kernel",
        )
