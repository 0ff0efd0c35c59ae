"""OPT136 norm-counted-by-every-rank: the squared norm of gradients that all ranks have is summed over the ranks, and the gradients are clipped by it

What it does
    Compares what goes into an all_reduce between the backward and the step with the squared norm of the gradients. A warning where every rank puts in
    the same number, that of all of its gradients, the sum is the number of ranks times it, and the gradients are then shortened so
    that it is this sum's root that meets the limit.

Why it is bad
    DDP has averaged the gradients: each rank holds the whole of them, and its norm is the norm. The sum is sqrt(world_size) too long a norm: gradients
    are clipped that were short enough, and the others come out sqrt(world_size) too short, more so with each rank that is added.

Wrong
    square = torch.stack([p.grad.pow(2).sum() for p in model.parameters()]).sum()
    dist.all_reduce(square)
    factor = (max_norm / square.sqrt()).clamp(max=1)

Right
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)     # under DDP no rank needs another's norm

Known limits
    Looks at the first steps, at sums of one number, at models of up to 50 million parameters. Shards (FSDP, tensor or pipeline parallel) differ
    from rank to rank, and are to be summed. The limit must be a number of one or two digits, which tells it from its multiple by the root of the
    number of ranks: with 4 or 16 ranks nothing is said as a rule. A norm that is only shown is healthy, whatever limit
    torch's own clip is given beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Run

MIN_STEPS = 3
SHORTER = 0.999  # of the square; what is left of one that was clipped
EQUAL = 1e-3


@dataclass(frozen=True)
class Clipped:
    """One step at which the gradients were shortened: norm before and after, and the root of the sum."""

    norm: float
    left: float
    root: float


class SquareSummed(Check):
    code = "OPT136"
    name = "norm-counted-by-every-rank"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        replicas.require(run)
        tables = [{(e.step, e.where): e for e in r.of("grad_square")} for r in run.present]
        if not all(tables):
            raise NotApplicable("no squared norm of gradients is summed over the ranks")
        steps = [[t[key] for t in tables] for key in sorted(set(tables[0]).intersection(*tables[1:]), key=lambda k: k[0])]
        if not steps or any(not _is_whole(events) for events in steps):
            return
        shortened = [events[0] for events in steps if events[0]["left"] < SHORTER * events[0]["own"]]
        clipped = [Clipped(*(math.sqrt(float(e[k])) for k in ("own", "left", "got"))) for e in shortened]
        limit = _limit(clipped, len(tables))
        if limit is not None and not _clipped_by_torch(run, clipped):
            yield self._found(run, steps[0][0].where, clipped, limit)

    def _found(self, run: Run, where: Where | None, clipped: Sequence[Clipped], limit: float) -> Finding:
        first = clipped[0]
        return self.finding(
            "the squared norm of the gradients, which are the same on all ranks, is summed over the ranks before the clip: the norm is"
            f" sqrt({run.world_size}) times too large",
            where=where,
            ranks=run.rank_ids,
            notes=[
                f"each rank's gradients have the norm {first.norm:.4g}, the sum makes it {first.root:.4g}",
                f"clipped to {first.left:.4g} where the limit is {limit:g}, at {len(clipped)} steps that were looked at",
            ],
            help="leave the all_reduce out: DDP has averaged the gradients; or call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)",
        )


def _is_whole(events: Sequence[Event]) -> bool:
    """Every rank has the same gradients, bit by bit, and the sum is as many times their square as there are ranks."""
    owns = {e["own"] for e in events}
    values = [e[k] for e in events for k in ("own", "got", "left")]
    if len(owns) != 1 or not all(isinstance(v, (int, float)) and math.isfinite(v) and v >= 0 for v in values):
        return False
    own = float(events[0]["own"])
    return own > 0 and all(abs(e["got"] - len(events) * own) <= EQUAL * e["got"] for e in events)


def _limit(clipped: Sequence[Clipped], num_ranks: int) -> float | None:
    """What the script compares the root of the sum with: all clipped gradients come to it but for the root of the number of ranks."""
    lefts = [c.left for c in clipped]
    if len(clipped) < MIN_STEPS or max(lefts) > (1 + EQUAL) * min(lefts) or max(c.norm for c in clipped) < 1.01 * min(c.norm for c in clipped):
        return None
    limit = lefts[0] * math.sqrt(num_ranks)
    # a sum that is divided by the ranks afterwards, or that is only shown, leaves the limit itself
    return float(f"{limit:.2g}") if _is_round(limit) and not _is_round(lefts[0]) else None


def _clipped_by_torch(run: Run, clipped: Sequence[Clipped]) -> bool:
    """torch's own clip was given the very norm that is left as its limit: it makes a norm of its own, and the sum is for the log."""
    limits = {float(e["max_norm"]) for e in run.present[0].of("clip") if isinstance(e["max_norm"], (int, float))}
    return any(abs(limit - c.left) <= EQUAL * c.left for limit in limits for c in clipped)


def _is_round(value: float) -> bool:
    """A number that a person types as a limit: one digit, or two."""
    return value > 0 and abs(float(f"{value:.2g}") - value) <= 2e-4 * value
