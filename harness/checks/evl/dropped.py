"""EVL110 eval-drops-samples: an evaluation leaves out samples because its loader or sampler drops the last ones.

What it does
    For evaluations that ran to the end of their loader: looks for samples that no rank was given, where the loader or its distributed
    sampler was made with `drop_last=True`, and a metric is reported afterwards.

Why it is bad
    The number is called that of the test set, and the last samples of it were never looked at. How many are left out depends on the batch
    size and on the number of processes.

Wrong
    DataLoader(test_set, batch_size=32, sampler=sampler, drop_last=True)

Right
    DataLoader(test_set, batch_size=32, sampler=sampler)           # a smaller last batch does no harm in evaluation

Known limits
    Only where the same samples are left out each time: a random order leaves out others in each pass. Silent on passes over what is
    trained on, on passes that the script ends early, and on evaluations that report nothing. What the
    sampler alone drops (less than one sample a rank) is advice, and so is less than one in a hundred. A rest that is evaluated in a pass of
    its own, as a Subset, is healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.evl import reports
from harness.model import Finding, Severity
from harness.record import Run, number

SMALL = 0.01  # of the data set. What a sampler drops is advice: less than one a rank, so that all ranks get equally many


class EvalDropsSamples(Check):
    code = "EVL110"
    name = "eval-drops-samples"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = {(p.rank, number(p.opened["dataset_id"], -1)) for p in passes.training(run)}
        trained |= {(p.rank, -2 - p.loader) for p in passes.training(run)}
        measured = [
            p for p in passes.evaluating(run)
            if p.complete and not p.shuffles and not p.iterable and not p.custom
            and (p.rank, number(p.opened["dataset_id"], -1)) not in trained and (p.rank, -2 - p.loader) not in trained
        ]  # fmt: skip
        if not measured:
            raise NotApplicable("no whole evaluation pass in a fixed order")
        groups: dict[tuple[object, ...], list[Pass]] = {}
        for group in passes.by_key(passes.few(measured)):
            groups.setdefault((*group[0].key, group[0].dataset_len), []).append(group[0])
        for group in groups.values():
            dropped = _dropped(run, group)
            if dropped > 0 and any(_told(run, p) for p in group) and not _rest_measured(run, group[0], dropped):
                yield self._found(run, group, dropped)

    def _found(self, run: Run, group: Sequence[Pass], dropped: int) -> Finding:
        first, size = group[0], group[0].dataset_len
        by_loader = bool(first.opened["drop_last"])
        return self.finding(
            f"{dropped} of {size} samples are left out of the evaluation: its {'loader' if by_loader else 'sampler'} drops the last ones",
            where=first.made if by_loader else first.made_sampler,
            ranks=[p.rank for p in group],
            notes=[f"evaluated: {', '.join(str(p.num_samples) for p in group[:8])} samples by rank, batches of {number(first.opened['batch_size'])}"],
            help="make the loader and the sampler of an evaluation with drop_last=False",
            severity=None if by_loader and dropped >= SMALL * size else Severity.ADVICE,
            evidence={"dropped": dropped, "samples": size},
        )


def _dropped(run: Run, group: Sequence[Pass]) -> int:
    """Samples that nobody was given; 0 where the shares are not known whole."""
    size = group[0].dataset_len
    shared = all(p.distributed is not None and number(p.distributed.get("num_replicas")) == run.world_size for p in group)
    if not any(p.opened["drop_last"] or (p.distributed or {}).get("drop_last") for p in group):
        return 0
    if shared and len(group) < run.world_size:
        return 0
    if not shared and any(p.distributed is not None for p in group):
        return 0
    drawn = [p.indices for p in group] if shared else [group[0].indices]
    if size <= 0 or any(len(i) != p.num_samples for i, p in zip(drawn, group, strict=False)):
        return 0
    return size - len(set().union(*drawn))


def _rest_measured(run: Run, one: Pass, dropped: int) -> bool:
    """Another pass, over a Subset of as many samples of a set of that size, measures what this one leaves out."""
    rests = [p.subset for p in passes.evaluating(run) if p.subset is not None]
    return any(number(s.get("of")) == one.dataset_len and number(s.get("num")) == dropped for s in rests)


def _told(run: Run, one: Pass) -> bool:
    """A metric is reported by some rank after the pass, before the next step."""
    assert one.closed is not None
    told = [r for own in reports.all_reports(run)[: passes.MAX_COMPARED] for r in own]
    return any(
        r.step == one.closed.step and r.t_ns > one.closed.t_ns and r.values() and (r.kind == "scalar" or reports.METRIC.search(r.text)) for r in told
    )
