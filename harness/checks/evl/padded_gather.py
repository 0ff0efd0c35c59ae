"""EVL120 gathered-padding-counted: shares are padded to the longest one to be gathered, and the padding is scored as well

What it does
    For evaluations of shares of unequal size in which every rank gathers predicted classes, and labels, of the longest share's length: computes
    the accuracy with and without what stands behind each rank's own samples. A finding where the first one is reported and the second is not.

Why it is bad
    The padding is mostly zeros, in predictions and in labels: samples that do not exist, all of class 0, all right. The score is too good, and
    depends on the number of processes.

Wrong
    dist.all_gather(parts, F.pad(mine, (0, longest - len(mine))))
    return torch.cat(parts)

Right
    return torch.cat([part[:n] for part, n in zip(parts, lengths)])

Known limits
    Needs whole numbers on the CPU, one a sample, and an accuracy of at least three digits in a printed or logged line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.evl import reports
from harness.checks.evl.reports import Value
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number, where_of

MIN_DIGITS, MIN_SHOWN = 3, 2


class GatheredPaddingCounted(Check):
    code = "EVL120"
    name = "gathered-padding-counted"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        shown: list[tuple[Event, float, float, Value]] = []
        seen = False
        for predicted, labels, shares in _scored(run):
            seen = True
            padded = _accuracy(predicted, labels, [number(e["leaves"]) for e in predicted])
            own = _accuracy(predicted, labels, shares)
            if abs(padded - own) < 1e-9:
                continue
            values = _reported(run, predicted[0])
            if any(_is(v, own) and not _is(v, padded) for v in values):
                return
            shown += [(predicted[0], padded, own, v) for v in values if _is(v, padded) and not _is(v, own)][:1]
        if not seen:
            raise NotApplicable("no predicted classes of shares of unequal size are gathered at one length")
        if len(shown) >= MIN_SHOWN:
            yield self._found(run, shown)

    def _found(self, run: Run, shown: Sequence[tuple[Event, float, float, Value]]) -> Finding:
        event, padded, own, value = shown[0]
        return self.finding(
            f"predictions and labels are padded to {event['leaves']} a rank to be gathered, and the padding is scored: accuracy {padded:.4f}, of the samples "
            f"themselves {own:.4f}",
            where=where_of(event["joined"]) or event.where,
            ranks=run.rank_ids,
            notes=[f"reported: {value.value:g}; so in {len(shown)} evaluations"],
            help="cut each part to the length that was gathered for it: `torch.cat([part[:n] for part, n in zip(parts, lengths)])`",
            evidence={"reported": value.value, "own": own},
        )


def _scored(run: Run) -> Iterable[tuple[list[Event], list[Event], list[int]]]:
    """(predictions, labels, samples of each rank): two gathers one after the other, behind evaluations of unequal shares."""
    columns = [[e for e in r.of("gathered") if e["classes"]] for r in run.present]
    if len(columns) != run.world_size or len({len(c) for c in columns}) != 1:
        return
    rows = list(zip(*columns, strict=True))
    for predicted, labels in pairwise(rows):
        sizes = {number(e["leaves"]) for e in (*predicted, *labels)}
        if len({e.step for e in (*predicted, *labels)}) > 1 or len(sizes) > 1:
            continue
        shares = [_samples(r, rank, e) for rank, (r, e) in enumerate(zip(run.present, predicted, strict=True))]
        if all(shares) and max(shares) == max(sizes) and min(shares) < max(sizes):
            yield list(predicted), list(labels), shares


def _samples(recording: Recording, rank: int, event: Event) -> int:
    """Of the last pass before it, if that was a whole evaluation of this step; 0 where it was none."""
    ended = [p for p in passes.of_recording(rank, recording) if p.closed is not None and p.closed.t_ns < event.t_ns]
    one = ended[-1] if ended else None
    if one is None or one.closed is None or not one.evaluates or not one.exhausted or one.closed.step != event.step:
        return 0
    return one.num_samples


def _accuracy(predicted: Sequence[Event], labels: Sequence[Event], nums: Sequence[int]) -> float:
    """Of the first so many entries of each rank."""
    hits = 0
    for guess, label, num in zip(predicted, labels, nums, strict=True):
        pairs = zip(passes.unpack(guess["classes"])[:num], passes.unpack(label["classes"])[:num], strict=False)
        hits += sum(a == b for a, b in pairs)
    return hits / max(1, sum(nums))


def _reported(run: Run, event: Event) -> list[Value]:
    later = [r for own in reports.all_reports(run) for r in own if r.t_ns > event.t_ns and r.step == event.step]
    return [v for r in later for v in r.values()]


def _is(value: Value, accuracy: float) -> bool:
    return value.digits >= MIN_DIGITS and (value.is_near(accuracy) or value.is_near(100 * accuracy))
