"""Losses that the ranks sum up in place and divide by their number, and then differentiate: read from what the probe saw at each backward."""

from __future__ import annotations

from dataclasses import dataclass

from harness.model import Where
from harness.record import Run, where_of

MIN_BACKWARDS = 4


@dataclass(frozen=True)
class UnseenSum:
    where: Where | None  # the all_reduce
    made: Where | None  # the loss
    num: int  # backwards of the first rank


def of(run: Run) -> UnseenSum | None:
    """None where some backward after such a reduction is another one, or something may make up for it."""
    told = [r.of("unseen_sum") for r in run.present]
    if run.world_size < 2 or len(told) < run.world_size or not all(len(own) >= MIN_BACKWARDS for own in told):
        return None
    if any(not e["side"] or e["given"] or e["made_up"] for own in told for e in own):
        return None
    if any(max(r.column("num_backward"), default=1) > 1 for r in run.present):
        return None  # the quotient may be that of the micro-batches
    first = told[0][0]
    return UnseenSum(where_of(first["at"]), where_of(first["made"]), len(told[0]))
