"""SYN104 unfrozen-after-wrap: parameters were unfrozen after the model was wrapped

What it does
    Compares the parameters of a wrapped model with those that DDP saw in its constructor, at each of the first 64 steps and every
    16th after.

Why it is bad
    requires_grad was False when DDP was constructed, so DDP has no hook on these parameters: they are trained on each rank's own
    gradient.

Wrong
    model = DDP(net)                    # net.backbone is frozen here
    for p in net.backbone.parameters(): p.requires_grad_(True)

Right
    for p in net.backbone.parameters(): p.requires_grad_(True)
    model = DDP(net)                    # wrap again after unfreezing

Known limits
    Parameters that DDP was told to ignore, and models whose gradients are averaged by hand, are silent: the finding needs
    gradients that differ, or torch's own failure.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class UnfrozenAfterWrap(Check):
    code = "SYN104"
    name = "unfrozen-after-wrap"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "LAU101", "SYN110", "SYN111", "OPT101", "SYN114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        hits = replicas.changes(run, "unfrozen")
        names = list(hits[0][1]["names"] or []) if hits else []
        parted = {n for p in facts.partings.values() for n in p.grad_names}
        failed = replicas.reduction_failed(run)
        if not hits or not (failed or parted & set(names) or replicas.has_unnamed(parted, names)):
            return
        yield self.finding(
            f"{len(names)} parameters were unfrozen after the model was wrapped: DDP does not average them",
            where=hits[0][1].where,
            ranks=replicas.rank_list([r for r, _ in hits]),
            notes=[replicas.listed(names), *(["torch failed a step later: expected to have finished reduction"] if failed else [])],
            help="wrap the model after this change (construct DDP again), or make the change before wrapping",
        )
