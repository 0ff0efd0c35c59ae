"""SYN110 unused-parameter: a parameter never enters the loss

What it does
    Looks for parameters of a DDP-wrapped model (without find_unused_parameters) whose gradient is None at a step, or that DDP
    gave up waiting for.

Why it is bad
    DDP waits for every parameter's gradient. One that never comes leaves the reduction unfinished: the ranks' gradients part at
    the first step, and torch fails at the second.

Wrong
    logits, aux = ddp(x)
    loss = criterion(logits, y)          # the auxiliary head is never used

Right
    loss = criterion(logits, y) + 0.4 * criterion(aux, y)      # use it, remove it, or DDP(net, find_unused_parameters=True)

Known limits
    With find_unused_parameters=True, or a static graph, an unused parameter is legal: silent. So is a gradient that came and that the
    script set to None before the step, on all ranks alike (layers that rest for a while).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class UnusedParameter(Check):
    code = "SYN110"
    name = "unused-parameter"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "LAU101", "HNG*", "SYN111")

    def end(self, run: Run) -> Iterable[Finding]:
        event = replicas.strict_wrap(run)
        columns = replicas.ungraded(run)
        common = set(columns[0]).intersection(*columns[1:]) if columns else set()
        if not common or any(set(c) != set(columns[0]) for c in columns):
            return
        names = [n for n in event["names"] or () if n in common]
        if names:
            yield self.finding(
                f"{len(names)} parameters of the wrapped model receive no gradient: {replicas.listed(names)}",
                where=replicas.loss_site(run) or event.where,
                ranks=run.rank_ids,
                notes=["DDP was constructed without find_unused_parameters", *replicas.failure_note(run)],
                help="let the parameters enter the loss, remove them, or construct DDP with find_unused_parameters=True",
            )
