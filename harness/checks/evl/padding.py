"""EVL101 eval-padding-duplicates: samples that a sampler repeats to fill up are counted twice in an evaluation.

What it does
    Finds evaluation passes under a DistributedSampler that pads (the data set does not divide by the number of ranks), and looks at what
    is reduced afterwards: sums over all ranks count the padding, gathered predictions can still be cut to the data set's length. Under any other
    sampler, and where each rank has a Subset, it compares the indices that the ranks draw: a finding where they are the whole data set and then some
    of it again, filled up to equal shares or whole batches, and the ranks add up a count of all of them.

Why it is bad
    The score depends on the number of processes; the first samples of the test set weigh double.

Wrong
    loader = DataLoader(test_set, sampler=DistributedSampler(test_set, shuffle=False))

Right
    loader = DataLoader(Subset(test_set, range(rank, len(test_set), world_size)))

Known limits
    Whether gathered predictions are cut afterwards is read from the source only: where it has anything that could (a slice up to a computed
    bound, in any dimension, a mask of what lies below one, a split, a zip with the labels, a set, a dict by index), the check is inconclusive; a model's
    forward is left out. Where a sum over the ranks is the data set's length, what is repeated weighs nothing. A sum that comes before such a gather, of
    batches or seconds, is no count of samples. Of a sampler other than a
    DistributedSampler the padding is found only where the number of samples is reduced as well as the score (or a multiple of it, as of tokens),
    in a tensor of at most eight elements.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.evl import reductions, repeats
from harness.checks.evl.repeats import Repeated
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Event, Recording, Run, number

NEAR_NS = 50_000_000  # the two events of one call
SUMS = ("all_reduce", "reduce", "all_reduce_coalesced")
GATHERS = ("all_gather", *protocol.GATHER_INTO, "gather", "gather_single", "all_gather_object", "gather_object", "all_gather_coalesced")


class EvalPaddingDuplicates(Check):
    code = "EVL101"
    name = "eval-padding-duplicates"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        passes.several_ranks(run)
        own = next((r for r in repeats.counted(run) if not any(_padding(p) > 0 for p in r.group)), None)
        if own is not None:
            yield self._found_drawn(own)
        sampled = [p for p in passes.evaluating(run) if p.distributed is not None and p.exhausted]
        if not sampled and passes.evaluating(run):
            return  # evaluated without a sampler that pads
        if not sampled:
            raise NotApplicable("no evaluation pass over a distributed sampler")
        padded = [p for p in sampled if _padding(p) > 0]
        uses = [(p, _use(run, p)) for p in padded]
        counted = [p for p, use in uses if use == "counted" and not _counted_once(run, p)]
        if counted:
            yield self._found(run, counted)
        elif any(use == "gathered" for _, use in uses):
            raise Inconclusive("predictions of a padded evaluation are gathered; whether they are cut to the data set's length is not seen")

    def _found(self, run: Run, counted: list[Pass]) -> Finding:
        first = counted[0]
        total, size = number((first.distributed or {}).get("total_size")), _size(first)
        return self.finding(
            f"the evaluation counts {total} samples, the data set has {size}: the sampler repeats {total - size} to fill up",
            where=first.made_sampler,
            ranks=sorted({p.rank for p in counted}),
            notes=[f"{number((first.distributed or {}).get('num_samples'))} samples on each of {run.world_size} ranks, then summed"],
            help="evaluate `Subset(test_set, range(rank, len(test_set), world_size))` instead, or drop what is repeated",
        )

    def _found_drawn(self, one: Repeated) -> Finding:
        first, more = one.group[0], one.total - one.size
        counts = f"; the count is reduced at line {one.summed.line}" if one.summed is not None else ""
        return self.finding(
            f"the evaluation counts {one.total} samples, the data set has {one.size}: the ranks together draw {more} of them once more, to fill up",
            where=first.made_sampler if first.subset is None else first.made_dataset,
            ranks=[p.rank for p in one.group],
            notes=[f"{first.num_samples} samples on each of {len(one.group)} ranks, then summed{counts}"],
            help="give the ranks shares without padding in an evaluation: `range(rank, len(test_set), world_size)`; they may differ by one",
            evidence={"counted": one.total, "samples": one.size},
        )


def _size(one: Pass) -> int:
    found = number((one.distributed or {}).get("dataset_len"), -1)
    return found if found >= 0 else one.dataset_len


def _padding(one: Pass) -> int:
    told = one.distributed or {}
    if told.get("drop_last") or number(told.get("num_replicas")) < 2 or _size(one) <= 0:
        return 0
    return number(told.get("total_size")) - _size(one)


def _counted_once(run: Run, one: Pass) -> bool:
    """Whether a count that the ranks add up behind it is that of the set, and none that with the padding: what is repeated weighs nothing."""
    return _size(one) in _totals(run, one) and not _counted_padded(run, one)


def _counted_padded(run: Run, one: Pass) -> bool:
    return number((one.distributed or {}).get("total_size")) in _totals(run, one)


def _totals(run: Run, one: Pass) -> set[float]:
    """What the ranks' numbers behind it come to together."""
    behind = [r for r in reductions.aligned(run) if r.kind == "sum" and repeats.is_behind(r, one)]
    return {sum(column) for r in behind for column in zip(*r.before, strict=True)}


def _use(run: Run, one: Pass) -> str:
    """What the next collectives do with the results: "counted", "gathered", or "" where nothing is exchanged."""
    recording = run.ranks[one.rank]
    if recording is None or one.closed is None:
        return ""
    inside = [e for e in recording.of("coll") if one.opened.t_ns < e.t_ns <= one.closed.t_ns]
    after = [e for e in recording.of("coll") if e.t_ns > one.closed.t_ns and e.step == one.closed.step]
    gathered = any(e["op"] in GATHERS and _per_sample(recording, e, one, inside=True) for e in inside)
    for event in [*inside, *after]:
        if event["op"] in SUMS and 0 < number(event["numel"]) <= 4096:
            later = any(e["op"] in GATHERS and e.t_ns > event.t_ns and _per_sample(recording, e, one, inside=False) for e in after)
            meters = later and (number(one.opened["batch_size"], 1) == 1 or not _counted_padded(run, one))  # of seconds a batch, say
            return "counted" if not (gathered or meters) or not _may_cut(recording) else "gathered"
        if event["op"] in GATHERS and event in after:
            gathered = _per_sample(recording, event, one, inside=False)
            return "gathered" if gathered and _may_cut(recording) else "counted"
    return "" if not gathered else "gathered" if _may_cut(recording) else "counted"


def _may_cut(recording: Recording) -> bool:
    """Whether the script's source has anything that could cut what is gathered to the data set's length; in doubt yes."""
    told = recording.of("gathered")
    return not told or any(e["cut"] is not False for e in told)


def _per_sample(recording: Recording, event: Event, one: Pass, *, inside: bool) -> bool:
    """As many values as samples; of an object, as far as its numbers were counted."""
    num = number(event["numel"], -1)
    if num < 0:
        told = [
            e for e in recording.of("gathered") if e["op"] == event["op"] and e.where == event.where and abs(e.t_ns - event.t_ns) < NEAR_NS
        ]
        num = number(told[0]["leaves"], -1) if told else -1
    return num < 0 or num >= (min(one.num_samples, number(one.opened["batch_size"], 1)) if inside else one.num_samples)
