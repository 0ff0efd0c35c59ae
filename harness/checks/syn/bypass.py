"""SYN101 forward-bypasses-ddp: the loss is computed without DDP's forward

What it does
    Looks for a backward that reaches parameters of a DDP-wrapped model whose `DDP.forward` has not run since the last step, with
    no gradient all-reduce in that backward.

Why it is bad
    DDP arms its reducer in its own forward. A call of `ddp.module(...)`, or of the model that was wrapped, skips it: every rank
    trains alone on its own shard, without a word.

Wrong
    loss = ddp.module.compute_loss(x, y)
    loss.backward()

Right
    loss = ddp(x, y)          # let forward() return the loss
    loss.backward()

Known limits
    A backward that averages the gradients by hand afterwards is healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class ForwardBypassesDdp(Check):
    code = "SYN101"
    name = "forward-bypasses-ddp"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "SYN102", "DAT102")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        hits = list(run.events("bypass"))
        parted = [p for p in facts.partings.values() if p.num_grad and set(p.grad_names or ("?",)) & (facts.ddp_names(p.opt) | {"?"})]
        if not hits or not parted:
            return
        _, first = hits[0]
        ranks = replicas.rank_list([r for r, _ in hits])
        yield self.finding(
            f"the loss does not go through DDP's forward: the gradients of {first['num']} parameters are never averaged",
            where=first.where,
            ranks=ranks,
            notes=[
                f"{parted[0].num_grad} of {parted[0].steps} steps had gradients that differ between ranks, the first "
                f"at step {parted[0].grad_step}",
                f"for example {replicas.listed(first['names'] or [])}",
            ],
            help="call the DDP object itself (`ddp(...)`), not `ddp.module` or the model that was wrapped; let its forward return the loss",
        )
