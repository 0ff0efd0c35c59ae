"""SYN112 reentrant-checkpoint-reuse: a layer is checkpointed twice with use_reentrant=True

What it does
    Looks for reentrant activation checkpointing under DDP together with gradients that differ between ranks on some of the parameters that
    DDP wraps, although its reducer has answered the backwards.

Why it is bad
    The reentrant variant runs a backward inside the backward: DDP marks the layer ready at its first use and misses the rest of
    its gradient.

Wrong
    x = checkpoint(layer, x, use_reentrant=True); x = checkpoint(layer, x, use_reentrant=True)

Right
    x = checkpoint(layer, x, use_reentrant=False)

Known limits
    A layer that is checkpointed once is healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class ReentrantCheckpointReuse(Check):
    code = "SYN112"
    name = "reentrant-checkpoint-reuse"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        used = [(r, e) for r, e in run.events("checkpoint") if e["reentrant"] is True]
        if not used:
            return
        for opt, parting in facts.partings.items():
            left = [n for n in parting.grad_names if n in facts.ddp_names(opt)]
            if left and facts.num_reduce and parting.equal_grad_names:
                yield self.finding(
                    f"reentrant checkpointing leaves {len(left)} parameters unsynchronised: {replicas.listed(left)}",
                    where=used[0][1].where,
                    ranks=run.rank_ids,
                    notes=[f"{parting.num_grad} of {parting.steps} steps had gradients that differ between ranks"],
                    help="pass use_reentrant=False to checkpoint()",
                )
                return
