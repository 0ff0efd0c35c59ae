"""SYN103 hooks-lost-by-move: a cast or move after wrapping ended gradient sync

What it does
    Looks for `.to()`, `.half()`, `.double()` and the like on a wrapped model that gave its parameters new storage, followed by
    backwards without a gradient all-reduce.

Why it is bad
    DDP hooks the gradient accumulators that exist when it is constructed. A cast or move replaces them: the hooks never fire
    again.

Wrong
    model = DDP(net)
    model.double()

Right
    net.double()
    model = DDP(net)

Known limits
    A move that changes nothing (`.to('cpu')` of a CPU model) is healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class HooksLostByMove(Check):
    code = "SYN103"
    name = "hooks-lost-by-move"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        moves = [(r, e) for r, e in run.events("wrap_moved")]
        if not moves:
            return
        parted = [p for p in facts.partings.values() if p.num_grad]
        if parted and facts.num_reduce < facts.num_ddp_steps:
            yield self.finding(
                "the model was cast or moved after it was wrapped: DDP's hooks sit on gradient accumulators that are gone",
                where=moves[0][1].where,
                ranks=replicas.rank_list([r for r, _ in moves]),
                notes=[f"{parted[0].num_grad} of {parted[0].steps} steps had gradients that differ between ranks"],
                help="cast or move the model first, then wrap it in DDP",
            )
