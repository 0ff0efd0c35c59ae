"""DAT102 data-not-sharded: the ranks train on the same samples.

What it does
    Compares what the ranks draw in training: the sample indices of their loaders, and, for batches made by hand, the content that reaches
    the model (with DDP) or losses and local gradients (without it), at every step, and the floating point targets of torch's own losses, which
    are the same where only noise or an augmentation differs. With DDP also whether one rank is fed what another
    had some batches before, while others still meet new ones; and whether the ranks' inputs differ first and are equal from a step on, as
    they are after a resume that gave every rank the generator of rank 0.

Why it is bad
    Gradients of equal batches average to themselves: N processes do the work of one. With `shuffle=True` and a seed of its own on each rank
    every epoch passes N times over the data instead of once.

Wrong
    loader = DataLoader(dataset, batch_size=32, shuffle=True)

Right
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)

Known limits
    A global batch that each rank cuts its part from is healthy: it is told by the number of samples that the model gets. Without DDP and
    with dropout that differs by rank, hand-made batches cannot be compared. Equal targets say nothing where they may be drawn noise (a denoiser: all
    ranks draw as much equal noise, or the source measures the loss against a draw). Ranks that
    follow each other are seen with inputs on the CPU, and while no rank meets a batch of its own again. A batch that never changes is advice only.
    A variable of another launcher is named as the cause where one file shows the way from its default to a share that goes into the data.
    Loaders of a phase in which the ranks share no gradient, before or after DDP is at work (a search by rank), are not compared: each rank should see
    all data there. A sampler that repeats each sample and deals the copies out (repeated augmentation) is meant where the copies look different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

from harness.checks.base import Check, Inconclusive
from harness.checks.dat import launcher_defaults, passes, retraced, same_targets, together
from harness.checks.dat.passes import Pass
from harness.checks.dat.retraced import Retraced
from harness.checks.syn import members
from harness.model import Finding, Severity, Where
from harness.record import Run

MIN_STEPS, MAX_STEPS = 3, 512
MIN_APART = 0.1  # of the samples at the same place: an augmentation may leave most of them as they are
MAX_WITNESSED, MIN_EQUAL = 256, 8  # steps whose inputs are looked at; equal ones in a row, after others
WEIGHTED = (
    "draw with a generator seeded with seed + rank (and len(dataset) // world_size draws a rank), or share the weighted draws out: a sampler of your "
    "own that takes every world_size-th of them from `rank` on; DistributedSampler alone would drop the weights"
)
HELP = "give the loader `sampler=DistributedSampler(dataset)` (and call `set_epoch`), or take every world_size-th sample from `rank` on"
REPEATED = "let what augments the samples draw with a seed of the rank's own, or repeat each sample another number of times"


class NotSharded(Check):
    code = "DAT102"
    name = "data-not-sharded"
    severity = Severity.ERROR
    explains = ("DAT109", "DAT113", "DAT114", "EVL104")

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        behind = retraced.find(run)
        if behind is not None:
            yield self._retraced(behind, run)
            return
        later = self._from_some_step_on(run)
        if later is not None:
            yield later
            return
        trained = passes.training(run)
        if not trained:
            aims = same_targets.find(run)
            yield from self._by_hand(run) if aims is None else [self._aims(aims, run)]
            return
        by_key: dict[object, list[list[Pass]]] = {}
        for group in passes.aligned(run, trained):
            if all(
                p.distributed is None and p.num_samples > 1 and p.order and not p.iterable and not p.opened["custom_batch_sampler"]
                for p in group
            ) and not members.apart(run, range(group[0].opened.step, group[0].opened.step + group[0].steps)):
                by_key.setdefault(group[0].key, []).append(group)
        unseen = False
        for groups in by_key.values():
            found, doubtful = self._equal(run, groups)
            unseen = unseen or doubtful
            found = found or (None if doubtful else self._whole(run, groups))
            if found is not None:
                yield found
                return
        if unseen:
            raise Inconclusive("equal indices, but whether the samples behind them are the same is not seen")

    def _equal(self, run: Run, groups: list[list[Pass]]) -> tuple[Finding | None, bool]:
        """(finding, whether it stays open): one loader whose indices are equal on all ranks in all passes."""
        first = groups[0]
        same = [g for g in groups[:16] if passes.same_order(g)]
        if len(same) < len(groups[:16]) or not any(len(p.indices) > 3 for p in first) or cut_afterwards(run, first) or held_apart(groups):
            return None, False
        if not all(p.distinct for p in first) and not losses_equal(run):
            return None, True
        repeats = all(p.opened["repeats"] is True for p in first)
        if repeats and _shown_apart(same):
            return None, False
        found = self.finding(
            f"all ranks draw the same samples in the same order: {_count(first)} of {_count(first)} indices are equal",
            where=first[0].made,
            ranks=run.rank_ids,
            notes=[f"{len(same)} of {len(groups[:16])} training passes; sampler: {first[0].opened['sampler']}{_of_sampler(first[0], repeats)}"],
            help=REPEATED if repeats else WEIGHTED if first[0].opened["sampler"] == "WeightedRandomSampler" else HELP,
            severity=Severity.WARNING if repeats else None,
        )
        return launcher_defaults.named(found, run), False

    def _whole(self, run: Run, groups: list[list[Pass]]) -> Finding | None:
        """One loader that every rank runs through, in another order."""
        first = groups[0]
        kept = _augmented(groups) and _kept_alike(run, first)
        if not all(_whole_everywhere(g[: passes.MAX_COMPARED], kept) for g in groups[:4]) or cut_afterwards(run, first):
            return None
        return self.finding(
            f"every rank passes over all {first[0].dataset_len} samples in each epoch, in an order of its own",
            where=first[0].made,
            ranks=run.rank_ids,
            notes=[f"samples drawn in one epoch: {sum(p.num_samples for p in first)} by {run.world_size} ranks"],
            help=HELP,
            severity=Severity.WARNING,
        )

    def _retraced(self, one: Retraced, run: Run) -> Finding:
        return self.finding(
            f"rank {one.follower} trains on the batches that rank {one.leader} had {one.lag} {'batch' if one.lag == 1 else 'batches'} before: "
            f"{one.num} of {one.of}",
            where=one.made,
            ranks=run.rank_ids,
            notes=[f"{one.different} different batches among the {one.fed} that the ranks were fed, none of them twice on one rank"],
            help="let each rank move on by what all ranks take in a step (world_size batches), not by its own batch",
        )

    def _from_some_step_on(self, run: Run) -> Finding | None:
        """The model's inputs differ between the ranks at first, and are equal from a step on to the end, although they change from step to step."""
        if not together.wrapped(run):
            return None
        batches: list[int] = []  # of rank 0; 0 where the ranks' differ
        for step in islice(run.steps(), MAX_WITNESSED):
            row = step.rows[0] if step.complete else None
            if row is None or not row.batch:
                break
            batches.append(row.batch if step.same("batch") else 0)
        first = next((i + 1 for i in reversed(range(len(batches))) if not batches[i]), 0)
        equal = batches[first:]
        if batches[:first].count(0) < max(MIN_STEPS, 0.9 * first) or len(equal) < MIN_EQUAL or len(set(equal)) < 0.5 * len(equal):
            return None
        restored = next((e.where for _, e in run.events("load") if e["done"] and e.step == first and e.where is not None), None)
        return self.finding(
            f"from step {first} on all ranks train on equal batches: the inputs of the model are bit-equal at {len(equal)} of {len(equal)} steps",
            where=restored or _drawn_at(run) or _backward_at(run),
            ranks=run.rank_ids,
            notes=[f"before, they differ at {batches[:first].count(0)} of {first} steps", *(["this line restores a file at that step"] if restored else [])],
            help="save the generator's state for each rank, or seed it anew with seed + rank after the resume" if restored else HELP,
            severity=self.severity if restored else Severity.WARNING,
        )

    def _by_hand(self, run: Run) -> Iterable[Finding]:
        wrapped = together.wrapped(run)
        batches: list[int] = []
        losses: list[float] = []
        for step in islice(run.steps(), MAX_STEPS):
            if not step.complete:
                continue
            if not _same_loss(step.number("loss")) or (wrapped and not step.same("batch")):
                return
            row = step.rows[0]
            if row is not None:
                batches.append(row.batch)
                losses.append(row.loss)
        if len(losses) < MIN_STEPS:
            raise Inconclusive("needs three steps")
        if wrapped and not all(batches):
            raise Inconclusive("what reaches the model was not seen")
        if not wrapped and not _same_local_gradients(run):
            return
        constant = len(set(batches if wrapped else losses)) == 1
        found = self.finding(
            f"all ranks train on equal batches: losses are bit-equal at {len(losses)} of {len(losses)} steps"
            + (", and so are the model's inputs" if wrapped else ", and so are the gradients before they are reduced"),
            where=_drawn_at(run) or _backward_at(run),
            ranks=run.rank_ids,
            notes=["one batch is used at every step"] if constant else [f"{len(set(losses))} different losses"],
            help="let each rank take its own part: rows `rank::world_size`, or a generator seeded with seed + rank",
            severity=Severity.ADVICE if constant else self.severity,
        )
        yield launcher_defaults.named(found, run)

    def _aims(self, one: same_targets.SameTargets, run: Run) -> Finding:
        """Equal targets say it even where noise or an augmentation of the rank's own makes the inputs differ."""
        found = self.finding(
            f"all ranks train on the same samples: what their losses are measured against is bit-equal in {one.num} of {one.num} batches",
            where=one.where or _drawn_at(run) or _backward_at(run),
            ranks=run.rank_ids,
            notes=[f"{one.different} different targets among them"],
            help="let each rank take its own part: rows `rank::world_size`, or a generator seeded with seed + rank",
            severity=Severity.WARNING,
        )
        return launcher_defaults.named(found, run)


def _count(group: list[Pass]) -> int:
    return min(len(p.indices) for p in group)


def cut_afterwards(run: Run, group: list[Pass]) -> bool:
    """The model got fewer samples than the loader gave: each rank cuts its part from a global batch."""
    for one in group:
        fed, sizes = together.rows_fed(run, one.rank), one.closed["batch_sizes"] if one.closed is not None else None
        if fed and isinstance(sizes, list) and sizes and isinstance(sizes[0], int) and fed * 2 <= sizes[0]:
            return True
    return not together.wrapped(run) and not losses_equal(run)


def losses_equal(run: Run) -> bool:
    """Without DDP nothing tells what the model got but the losses; where they differ, so may the data."""
    steps = [s for s in run.steps() if s.complete][:64]
    return bool(steps) and all(_same_loss(s.number("loss")) for s in steps)


def _of_sampler(one: Pass, repeats: bool) -> str:
    if repeats:
        return ", which deals the copies of each sample out among the ranks: they are alike on all"
    return ", the script's own" if one.opened["custom_sampler"] else ", no rank in it"


def _shown_apart(groups: list[list[Pass]]) -> bool:
    """What the ranks have at the same place is one sample by its index, and looks different on them."""
    pairs = [(a, b) for group in groups[:4] for other in group[1 : passes.MAX_COMPARED] for a, b in zip(group[0].rows, other.rows, strict=False)]
    return bool(pairs) and sum(a != b for a, b in pairs) >= MIN_APART * len(pairs)


def held_apart(groups: list[list[Pass]]) -> bool:
    """Equal indices into data sets of the ranks' own: shards that were cut before the loader was made."""
    if any(len({p.dataset_len for p in group}) > 1 for group in groups):
        return True
    differing = [g for g in groups if len({p.rows[: min(len(q.rows) for q in g)] for p in g}) > 1]
    return bool(differing) and not _augmented(groups) and not _same_labels(differing)


def _augmented(groups: list[list[Pass]]) -> bool:
    """A sample looks different each time on one rank already: then other content on another rank says nothing."""
    seen: dict[tuple[object, int], int] = {}
    for one in (g[0] for g in groups if g[0].key == groups[0][0].key):
        part = (one.subset or {}).get("order")  # another Subset each epoch: the same index means another sample
        for index, row in zip(one.indices, one.rows, strict=False):
            if seen.setdefault((part, index), row) != row:
                return True
    return False


def _same_labels(groups: list[list[Pass]]) -> bool:
    """Labels that are different for most samples, in the same order on all ranks."""
    return all(len({p.labels for p in g}) == 1 and len(set(g[0].labels)) > 0.5 * len(g[0].labels) > 0 for g in groups)


def _kept_alike(run: Run, group: list[Pass]) -> bool:
    """Augmented samples cannot be compared; but the data sets keep the same things in the same order on all ranks, one of them an entry a
    sample."""
    kept = []
    for one in group:
        recording = run.ranks[one.rank]
        told = next((e["attributes"] for e in (recording.of("dataset") if recording is not None else ()) if e["loader"] == one.loader), None)
        kept.append({k: (v[0], v[2]) for k, v in told.items()} if isinstance(told, dict) else {})
    return all(k == kept[0] for k in kept) and any(length == group[0].dataset_len for _, length in kept[0].values())


def _whole_everywhere(group: list[Pass], kept_alike: bool = False) -> bool:
    """Each rank drew (nearly) every index once, and the samples behind the indices are the same ones."""
    for one in group:
        drawn, total = set(one.indices), one.dataset_len
        if total < 4 or one.custom or one.opened["replacement"] or one.opened["sampler"] not in ("RandomSampler", "SequentialSampler"):
            return False
        if len(drawn) != len(one.indices) or len(drawn) < 0.9 * total or not one.exhausted:
            return False
    rows = [set(p.rows) for p in group]
    if len({p.dataset_len for p in group}) > 1 or not (kept_alike or all(p.distinct for p in group)):
        return False
    return kept_alike or all(len(rows[0] & other) >= 0.8 * len(rows[0]) for other in rows[1:])


def _same_loss(values: list[float]) -> bool:
    return len(set(values)) == 1 and all(math.isfinite(v) for v in values)


def _same_local_gradients(run: Run) -> bool:
    """Gradients before any reduction, in the first steps: equal on all ranks, and there."""
    columns = []
    for recording in run.present:
        columns.append([tuple(sorted((k, tuple(v)) for k, v in (e["local"] or {}).items())) for e in recording.of("gradients")][:6])
    num = min((len(c) for c in columns), default=0)
    return num >= 2 and all(columns[0][i] and len({c[i] for c in columns}) == 1 for i in range(num))


def _drawn_at(run: Run) -> Where | None:
    """Where the batch was drawn: the last integer draw of the script before its first steps."""
    return next((e.where for _, e in run.events("draw") if e["whole"] is False and not e["data"]), None)


def _backward_at(run: Run) -> Where | None:
    return next((e.where for _, e in run.events("accumulation") if e.where is not None), None)
