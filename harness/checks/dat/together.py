"""Whether the ranks train one model together on data of their own (data parallelism over the whole world), as all checks of sharding
presuppose.

Tensor and pipeline parallel groups share their data on purpose; so do ranks that train alone. Neither is judged.
"""

from __future__ import annotations

from harness.checks import regime
from harness.checks.base import NotApplicable
from harness.checks.dat.passes import several_ranks
from harness.record import Run

MAX_STEPS = 256


def required(run: Run) -> None:
    """NotApplicable unless the ranks are replicas of one model that sync their gradients over the whole world."""
    several_ranks(run)
    reason = regime.other(run)
    if reason and not reason.startswith("local SGD"):  # whose ranks hold shares of the data like any others
        raise NotApplicable(reason)
    found = run.__dict__.get("_together")
    if found is None:
        found = run.__dict__["_together"] = (
            "" if _wrapped(run) or _synced_by_hand(run) else "the ranks do not train replicas of one model over the whole world"
        )
    if found:
        raise NotApplicable(str(found))


def wrapped(run: Run) -> bool:
    """Every rank wraps a model in DDP over the whole world, and its backwards communicate."""
    return _wrapped(run)


def _wrapped(run: Run) -> bool:
    return all(any(e["group_size"] == run.world_size for e in r.of("wrap")) for r in run.present)


def _synced_by_hand(run: Run) -> bool:
    """Parameters start equal, and (nearly) every step moves at least as much through collectives as it takes to keep them equal."""
    starts = [tuple(e["each"] or ()) for r in run.present for e in r.of("initial")[:1]]
    if len(starts) < len(run.present) or len(set(starts)) != 1 or not any(starts[0]):
        return False
    steps = synced = equal = 0
    for step in run.steps():
        if not step.complete:
            continue
        steps += 1
        synced += min(step.number("num_coll")) > 0
        equal += step.same("param")
        if steps >= MAX_STEPS:
            break
    return steps > 0 and synced >= 0.5 * steps and equal >= 0.5 * steps


def rows_fed(run: Run, rank: int) -> int:
    """Samples that went through the model at a step of a rank: the commonest of the first steps; 0 where it is not known."""
    recording = run.ranks[rank]
    counts = [int(e["rows"]) for e in recording.of("accumulation") if isinstance(e["rows"], int) and e["rows"]] if recording else []
    return max(set(counts), key=counts.count) if counts else 0
