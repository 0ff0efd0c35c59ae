"""SYN106 parameter-rebound-after-wrap: parameters were replaced by new Parameter objects after the model was wrapped

What it does
    Compares the parameters of a wrapped model with those that DDP saw in its constructor, at each of the first 64 steps and every
    16th after.

Why it is bad
    A new Parameter has no hook. DDP waits for the old one and fails a step late with a message that names neither, or the new one
    trains alone.

Wrong
    model = DDP(net)
    net.out.weight = nn.Parameter(w)

Right
    with torch.no_grad(): net.out.weight.copy_(w)     # in place, or rebind before wrapping

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


class ParameterReboundAfterWrap(Check):
    code = "SYN106"
    name = "parameter-rebound-after-wrap"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "LAU101", "SYN110", "SYN111", "OPT101", "SYN114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        hits = replicas.changes(run, "rebound")
        names = list(hits[0][1]["names"] or []) if hits else []
        parted = {n for p in facts.partings.values() for n in p.grad_names}
        failed = replicas.reduction_failed(run)
        if not hits or not (failed or parted & set(names) or replicas.has_unnamed(parted, names)):
            return
        yield self.finding(
            f"{len(names)} parameters were replaced by new Parameter objects after the model was wrapped: DDP does not average them",
            where=hits[0][1].where,
            ranks=replicas.rank_list([r for r, _ in hits]),
            notes=[replicas.listed(names), *(["torch failed a step later: expected to have finished reduction"] if failed else [])],
            help="wrap the model after this change (construct DDP again), or make the change before wrapping",
        )
