"""DAT103 sampler-seed-differs: the ranks' samplers shuffle differently, so that their shares overlap.

What it does
    Compares seed and epoch of the shuffling distributed samplers over the ranks, pass by pass.

Why it is bad
    Each rank takes its share from a permutation of its own. Some samples are drawn by several ranks, others by none, in every epoch.

Wrong
    sampler = DistributedSampler(dataset, seed=args.seed + rank)

Right
    sampler = DistributedSampler(dataset, seed=args.seed)      # one permutation; the rank picks the part

Known limits
    Looks at samplers that bear `num_replicas` and `rank`, as torch's own do.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity, Where
from harness.record import Run


class SeedDiffers(Check):
    code = "DAT103"
    name = "sampler-seed-differs"
    severity = Severity.ERROR
    explains = ("DAT114",)

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        shuffled = [p for p in passes.training(run) if p.distributed is not None and p.distributed.get("shuffle")]
        groups = passes.aligned(run, shuffled)
        if not groups:
            raise NotApplicable("no training pass over a shuffling distributed sampler on all ranks")
        for group in groups:
            for what in ("seed", "epoch"):
                values = [(p.distributed or {}).get(what) for p in group]
                if len({repr(v) for v in values}) > 1 and None not in values:
                    yield self._found(run, group, what, values)
                    return

    def _found(self, run: Run, group: list[Pass], what: str, values: list[object]) -> Finding:
        drawn = [i for p in group for i in p.indices]
        total = max(p.dataset_len for p in group)
        notes = [f"{what} by rank: {', '.join(str(v) for v in values[:8])}"]
        if drawn and total > 0:
            notes.append(f"{len(drawn)} samples drawn by all ranks, {len(set(drawn))} different ones of {total}")
        return self.finding(
            f"the samplers' {what} differs by rank: each rank takes its share from another permutation",
            where=group[0].made_sampler if what == "seed" else _set_epoch(run, group[0]) or group[0].where,
            ranks=[p.rank for p in group],
            notes=notes,
            help="give every rank the same seed"
            if what == "seed"
            else "call `sampler.set_epoch(epoch)` with the same number on every rank",
        )


def _set_epoch(run: Run, one: Pass) -> Where | None:
    return next((e.where for _, e in run.events("set_epoch") if e.where is not None), None)
