"""SYN117 clip-before-sync: gradients are clipped before they are averaged, or by the norm of one rank's shard

What it does
    Compares the norms that clip_grad_norm_ returned at the same step on all ranks, where the gradients at the step are equal. An error where a
    norm was above the limit, so that it was clipped; advice where none was so far. Looks into hooks on parameters (`p.register_hook`) as well: they
    see the rank's own gradient, and one that brings the ranks' different gradients to the same norm clips before DDP averages.
    Where gradients are sharded (DTensor: `fully_shard`, tensor parallelism), compares the factor that the script multiplies each rank's shard by;
    so where it reduce-scatters one flat vector of gradients.

Why it is bad
    Each rank clips by the norm of its own gradient; the mean of clipped gradients is not the clipped mean. The parameters stay
    equal, so nothing else shows it. A shard's norm is not the norm of the gradient: the parts of one gradient are shortened by different factors, and
    it points elsewhere.

Wrong
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    average_gradients(model)

Right
    loss.backward()
    average_gradients(model)
    clip_grad_norm_(model.parameters(), 1.0)

Known limits
    Needs two steps whose norms differ. A hook that multiplies by a constant, a mask or the rank's share of the batch is healthy; one that clamps
    element by element is not judged. A call without a limit (`max_norm=inf`, to log the norm) clips nothing, and is healthy. Where a statement clips what
    another optimizer steps than the next one, only the first 200 calls are looked at. Of shards, up to eight a rank are looked at in the first six
    steps; where no one factor explains what became of one (noise, an element-wise clamp), or the ranks' factors keep their proportion over the steps
    (rows that learn slower), nothing is said. Where each gradient has a factor of its own (layer by layer), or one alone was looked at, it is advice:
    a shard may be whole rows that are meant to be scaled by themselves. Parts of a flat vector are looked at on the CPU, where the call is waited for
    (no `async_op`); a warning, as what the part is used for is not seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import clips, replicas, shard_scales
from harness.model import Finding, Severity
from harness.record import Event, Run


class ClipBeforeSync(Check):
    code = "SYN117"
    name = "clip-before-sync"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        if (parts := shard_scales.find(run)) is not None:
            yield self._of_shards(parts)
            return
        replicas.require(run)
        told = [e for _, e in run.events("clip")]
        if (by_hook := _hooked(run)) is not None:
            yield by_hook.finding(self)
            return
        if not told:
            raise NotApplicable("no gradient clipping")
        if clips.limit(told) == math.inf:
            return  # nothing is clipped: the norms are read only
        wrong = clips.differing(run)
        if len(wrong) >= 2:
            clipped = [w for w in wrong if w.clipped]
            first = (clipped or wrong)[0]
            yield self.finding(
                "gradients are clipped by each rank's own norm before they are averaged",
                where=first.where,
                ranks=run.rank_ids,
                notes=[f"norms at step {first.step}: {first.low:.4g} to {first.high:.4g}; {len(wrong)} steps, of which {len(clipped)} had a norm above the limit"],
                help="average the gradients first, then clip",
                severity=None if clipped else Severity.ADVICE,
            )

    def _of_shards(self, parts: shard_scales.Apart) -> Finding:
        factors = ", ".join(f"{factor:.4g} on rank {rank}" for rank, factor in parts.factors[:8])
        beside = "" if parts.whole else "; healthy where the rows that a rank holds belong together, as those of a head, and are meant to be scaled by themselves"
        return self.finding(
            "each rank multiplies its shards of the gradients by a factor of its own: they are parts of one gradient"
            if parts.whole
            else "each rank multiplies its part of one flat gradient by a factor of its own"
            if parts.flat
            else "each rank multiplies its shard of a gradient by a factor of its own, which is another for each gradient",
            where=parts.where,
            ranks=tuple(rank for rank, _ in parts.factors),
            notes=[f"`{parts.name}` at step {parts.step}: {factors}; {parts.num_steps} steps of those that were looked at"],
            help="the norm of a shard is no norm of the gradient: all-reduce the sum of the squares before its root is taken"
            + ("" if parts.flat else f", or call torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which does so for DTensors{beside}"),
            severity=None if parts.whole else Severity.WARNING if parts.flat else Severity.ADVICE,
        )


@dataclass(frozen=True)
class Hooked:
    """Hooks on parameters that bring each rank's own gradient to one norm."""

    first: Event
    befores: tuple[float, ...]
    limit: float
    num: int
    ranks: tuple[int, ...]

    def finding(self, check: Check) -> Finding:
        return check.finding(
            "gradients are clipped by each rank's own norm before they are averaged: a hook on the parameters sees the local gradient",
            where=self.first.where,
            ranks=self.ranks,
            notes=[
                f"norms at step {self.first.step}: {', '.join(f'{b:.4g}' for b in self.befores)}, of which the hook makes {self.limit:.4g} at most; "
                f"{self.num} steps"
            ],
            help="clip after the backward, when DDP has averaged the gradients: read p.grad before optimizer.step() instead of a hook",
        )


def _hooked(run: Run) -> Hooked | None:
    tables = [{(e.step, e["key"]): e for e in r.of("leaf_hook")} for r in run.present]
    agree = {s.index for s in run.steps() if s.complete and s.same("grad")} if all(tables) else set()
    hits = []
    for key in sorted(set(tables[0]).intersection(*tables[1:])) if tables else ():
        events = [t[key] for t in tables]
        if key[0] in agree and (limit := _brought_to(events)) is not None:
            hits.append((events, limit))
    if len({e[0].step for e, _ in hits}) < 2:
        return None
    events, limit = hits[0]
    return Hooked(events[0], tuple(float(e["before"]) for e in events), limit, len({e[0].step for e, _ in hits}), run.rank_ids)


def _brought_to(events: Sequence[Event]) -> float | None:
    """The one norm that a hook brings the ranks' different gradients to, by a factor each; those that it leaves alone are shorter."""
    changed = [e for e in events if abs(e["after"] - e["before"]) > 1e-4 * e["before"]]
    befores = [float(e["before"]) for e in events]
    if not changed or not all(e["along"] for e in changed) or max(befores) <= min(befores) * (1 + 1e-3):
        return None
    limit = float(changed[0]["after"])
    one = all(abs(e["after"] - limit) <= 1e-3 * limit for e in changed)
    rest = all(e["before"] <= limit * (1 + 1e-3) for e in events if e not in changed)
    return limit if one and rest and limit > 0 else None
