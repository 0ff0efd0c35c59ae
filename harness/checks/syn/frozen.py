"""SYN107 frozen-after-wrap: parameters were frozen after the model was wrapped

What it does
    Compares requires_grad with what DDP saw in its constructor.

Why it is bad
    The reducer waits for the gradient of every parameter that required one when it was wrapped. torch fails at the second step
    with "expected to have finished reduction", which does not name the freezing.

Wrong
    model = DDP(net)
    net.backbone.requires_grad_(False)

Right
    net.backbone.requires_grad_(False)
    model = DDP(net)

Known limits
    With find_unused_parameters=True the frozen part is merely skipped: silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class FrozenAfterWrap(Check):
    code = "SYN107"
    name = "frozen-after-wrap"
    severity = Severity.ERROR
    explains = ("LAU101", "SYN110", "SYN111", "SYN127", "OPT111", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2 or not any(True for _ in run.events("wrap")):
            raise NotApplicable("no model is wrapped in DistributedDataParallel on several ranks")
        hits = replicas.changes(run, "frozen")
        if not hits or not replicas.reduction_failed(run):
            return
        names = list(hits[0][1]["names"] or [])
        yield self.finding(
            f"{len(names)} parameters were frozen after the model was wrapped: DDP's reducer waits for their gradients",
            where=hits[0][1].where,
            ranks=replicas.rank_list([r for r, _ in hits]),
            notes=[replicas.listed(names)],
            help="freeze first, then wrap; or construct DDP again after freezing",
        )
