"""OPT107 mean-of-means: ranks average over batches of different size, and DDP weighs them alike

What it does
    Compares the number of samples that each rank drew for the same step, and the count that each rank's loss was divided by last (valid
    tokens, masked samples, objects), or each of its terms was, where the ranks' gradients are averaged plainly, by DDP, FSDP2 or by hand. Counts
    that differ now here and now there are advice.

Why it is bad
    DDP averages the ranks' gradients with equal weights. A sample on the rank with the small batch counts for more: the gradient
    is not that of the global batch (27 to 49 % error seen).

Wrong
    batch_size = 12 if rank == 0 else 4   # mean loss on each

Right
    loss = loss_sum * dist.get_world_size() / global_num_samples

Known limits
    One short batch at the end of an epoch is normal and silent, so are batches that hold more samples now here and now there; a loss
    that bears a factor is not judged, nor one of which only some terms are divided by the count. A mean over what the rank holds (valid tokens, boxes,
    foreground) is as common as the mean over all ranks, and where no rank has fewer for good the two differ by noise more than by a bias: so advice,
    where the ranks' counts are 1.25 times apart in most of at least 8 steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.syn import gradients, replicas
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run, texts, where_of

MIN_VARYING = 8


class MeanOfMeans(Check):
    code = "OPT107"
    name = "mean-of-means"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        counts = _counts(run)
        if _is_fully_sharded(run) and counts:
            yield from self._by_count(run, counts)
            return
        facts = replicas.require(run)
        if (by_count := list(self._by_count(run, counts))) and _averaged_plainly(run, facts):
            yield from by_count
            return
        if not all(len(p.indices) == p.num_samples for p in passes.all_passes(run) if p.complete):
            raise NotApplicable("the first dimension of the batches is not the number of samples")
        uneven, seen = 0, 0
        totals, largest = [0] * run.world_size, [0] * run.world_size
        example: list[int] = []
        for step in run.steps():
            sizes = step.number("num_samples")
            if step.complete and all(sizes) and len(set(step.number("num_batches"))) == 1:
                seen += 1
                if max(sizes) > 1.1 * min(sizes):
                    uneven += 1
                    totals = [a + b for a, b in zip(totals, sizes, strict=True)]
                    largest[sizes.index(max(sizes))] += 1
                    example = example or sizes
        if not seen:
            raise NotApplicable("no step drew batches from a loader on all ranks")
        losses = [e for _, e in run.events("loss")]
        if any(e["scaled"] or e["reduction"] != "mean" for e in losses):
            raise NotApplicable("the loss bears a factor of its own, or is no mean")
        # batches that are packed by length differ too, now here and now there: no rank weighs more than another
        lasting = max(totals) > 1.1 * max(1, min(totals)) and max(largest) >= 0.9 * uneven
        if uneven >= 3 and uneven >= 0.5 * seen and lasting:
            yield self.finding(
                f"ranks draw batches of different size ({', '.join(map(str, example))} samples) and their mean losses weigh alike",
                where=next((p.made for p in passes.all_passes(run) if p.trains and p.made), None)
                or replicas.first_where(run, "loader")
                or facts.grad_site(0),
                ranks=run.rank_ids,
                notes=[f"{uneven} of {seen} steps"],
                help="draw equal batches, or weigh each rank's loss: loss * local_n * world_size / global_n",
            )

    def _by_count(self, run: Run, steps: list[list[float]]) -> Iterable[Finding]:
        """Ranks divide by counts of their own and weigh alike; one lasting by far fewer, or now this one and now that."""
        uneven = [c for c in steps if max(c) > 1.1 * min(c)]
        if len(uneven) < 3 or len(uneven) < 0.5 * len(steps):
            return
        totals = [sum(column) for column in zip(*uneven, strict=True)]
        largest = [sum(c.index(max(c)) == rank for c in uneven) for rank in range(run.world_size)]
        lasting = max(totals) > 1.25 * min(totals) and max(largest) >= 0.9 * len(uneven)
        if not lasting and (median(map(_apart, steps)) < 1.25 or len(steps) < MIN_VARYING):
            return
        told = run.present[0].of("divisor")[0]
        yield self.finding(
            f"each rank's loss is divided by a count of its own ({', '.join(f'{v:g}' for v in uneven[0][:8])}) and the gradients weigh alike",
            where=where_of(told["made"]) or told.where,
            ranks=run.rank_ids,
            notes=[f"{len(uneven)} of {len(steps)} steps" if lasting else _varying(steps)],
            help="divide by the count of all ranks: all-reduce it, and use loss_sum * world_size / global_count",
            severity=None if lasting else Severity.ADVICE,
        )


def _apart(counts: list[float]) -> float:
    return max(counts) / min(counts)


def _varying(steps: list[list[float]]) -> str:
    apart = [_apart(c) for c in steps]
    return (
        f"a mean of means: what is counted weighs {median(apart):.2g} times as much on one rank as on another in the median of {len(steps)} steps, "
        f"{max(apart):.2g} times at most; no rank has fewer for good"
    )


def _counts(run: Run) -> list[list[float]]:
    """What the ranks divided by, a list a step; only of steps at which each did. None where the terms bear factors that are not the same throughout:
    they may make up for it."""
    tables: list[dict[int, float]] = []
    for recording in run.present:
        own: dict[int, float] = {}
        for event in recording.of("divisor"):
            if isinstance(event["value"], (int, float)) and event["value"] > 1:
                own[event.step] = own.get(event.step, 0.0) + float(event["value"])
        tables.append(own)
    if len({repr(e["factors"]) for _, e in run.events("divisor")}) > 1:
        return []
    common = set(tables[0]).intersection(*tables[1:]) if len(tables) == run.world_size > 1 else set()
    return [[own[step] for own in tables] for step in sorted(common)]


def _is_fully_sharded(run: Run) -> bool:
    """By fully_shard, over all ranks in one group: its reduce-scatter averages."""
    roots = [r for _, e in run.events(protocol.PARAMS) if e["sharded"] for r in texts(e["roots"])]
    return bool(roots) and all(r.startswith("FSDP") for r in roots)


def _averaged_plainly(run: Run, facts: replicas.Replicas) -> bool:
    """By DDP itself, or by hand to the mean of what the backwards left; a rank that weighs its gradients first does not come out there."""
    if any(e["after"] != e["before"] for _, e in run.events("leaf_hook")):
        return False  # it may weigh them
    ratios = [ratio * run.world_size for _, _, ratio in gradients.ratios(run)]
    if ratios:
        return sum(abs(r - 1) < 1e-3 for r in ratios) >= 0.8 * len(ratios)
    return facts.wrapped and not any(True for _ in run.events("comm_hook"))
