"""SYN103 hooks-lost-by-move: a cast or move after wrapping ended gradient sync

What it does
    Looks for `.to()`, `.half()`, `.double()` and the like on a wrapped model that gave its parameters new storage, followed by
    backwards without a gradient all-reduce; and for parameters whose `.data` was replaced, where DDP's reducer is silent from there on although
    its forward runs.

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
    A move that changes nothing (`.to('cpu')` of a CPU model) is healthy and silent. So is new `.data` of the same type: it keeps the hooks.
    A cast to another type and back does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run


class HooksLostByMove(Check):
    code = "SYN103"
    name = "hooks-lost-by-move"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        moves = [(r, e) for r, e in run.events("wrap_moved") if not e["data"]]
        parted = [p for p in facts.partings.values() if p.num_grad]
        if not moves:
            yield from self._by_data(run, facts, parted)
            return
        if parted and facts.num_reduce < facts.num_ddp_steps:
            yield self.finding(
                "the model was cast or moved after it was wrapped: DDP's hooks sit on gradient accumulators that are gone",
                where=moves[0][1].where,
                ranks=replicas.rank_list([r for r, _ in moves]),
                notes=[f"{parted[0].num_grad} of {parted[0].steps} steps had gradients that differ between ranks"],
                help="cast or move the model first, then wrap it in DDP",
            )

    def _by_data(self, run: Run, facts: replicas.Replicas, parted: list[replicas.Parting]) -> Iterable[Finding]:
        moves = list(run.events("wrap_moved"))
        start = replicas.unaveraged(facts, parted[0].opt) if moves and parted else None
        if start is None or not start - 1 <= moves[0][1].step <= start + 1 or not _through_ddp(run, start):
            return
        yield self.finding(
            f"parameters got other `.data` after they were wrapped: DDP's hooks sit on gradient accumulators that are gone, and no gradient "
            f"is averaged from step {start} on",
            where=moves[0][1].where,
            ranks=replicas.rank_list([r for r, _ in moves]),
            notes=[f"DDP's reducer issued an all-reduce at {facts.num_reduce} steps before, and at none of the {facts.num_silent} from there on"],
            help="a change of type or device, even there and back, drops the hooks: work on a copy and `copy_()` the result, or wrap the model anew",
        )


def _through_ddp(run: Run, start: int) -> bool:
    """Whether each step since then had a forward through DDP, outside of no_sync()."""
    steps = [s for s in run.steps() if s.complete and s.index >= start and s.number("flags")[0] & protocol.FLAG_DDP]
    return all(min(s.number("num_forward")) > 0 and not s.number("flags")[0] & protocol.FLAG_NO_SYNC for s in steps)
