"""PRF116 objects-grow: what one statement pickles and sends to the other ranks grows from call to call.

What it does
    Weighs the objects of all_gather_object, gather_object and broadcast_object_list by statement. A finding where they grow all through the run and are
    large at its end: a warning where these calls take a twentieth of the time in the second half of them, else advice from 1 MiB on.

Why it is bad
    A list that is only ever added to is pickled, sent and unpickled whole at each call: the n-th call costs n times the first, the run as a whole goes with
    the square of its length, and every rank holds every rank's copy.

Wrong
    episodes.extend(finished)
    dist.all_gather_object(gathered, episodes)       # all of them, each time

Right
    dist.all_gather_object(gathered, finished)       # what is new; or episodes[-window:]

Known limits
    Needs 32 calls of a statement. What levels off is silent: a window that fills; so is what holds nothing of the call before: samples that a curriculum
    makes longer. That is not known of objects that travel over a GPU. Tensors are not weighed: a batch that grows on purpose looks the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Event, Run

OPS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
NUM_BLOCKS, MIN_GROWTH = 8, 3.0
LEVELS_OFF = 0.5  # of the growth in the first half of the blocks; what is only added to has 0.75
MIN_KNOWN, MOSTLY_NEW = 8, 0.3
LARGE_BYTES, HUGE_BYTES, DEAR = 64 * 2**10, 2**20, 0.05


@dataclass(frozen=True)
class Growth:
    """Of the calls of one statement."""

    where: Where
    op: str
    num_calls: int
    first_bytes: float
    last_bytes: float
    share: float  # of the time between the middle call and the last


class ObjectsGrow(Check):
    code = "PRF116"
    name = "objects-grow"
    severity = Severity.WARNING
    explains = ("MEM103", "PRF102")

    def end(self, run: Run) -> Iterable[Finding]:
        newest = [{(e.where.file, e.where.line): e for e in r.of("payloads") if e.where is not None} for r in run.ranks if r is not None]
        if not any(e["op"] in OPS for _, e in run.events("coll")) and not any(newest):
            raise NotApplicable("no statement pickles objects for other ranks")
        found = [(rank, one) for rank, by_place in enumerate(newest) for e in by_place.values() if (one := _growth(e)) is not None]
        if not found:
            return
        _, worst = max(found, key=lambda f: (f[1].share, f[1].last_bytes))
        yield self.finding(
            f"{worst.op} sends more at every call: {_size(worst.first_bytes)} at first, {_size(worst.last_bytes)} after {worst.num_calls} calls, "
            f"{worst.share:.0%} of the time by then",
            where=worst.where,
            ranks=sorted({rank for rank, one in found if one.where == worst.where}),
            severity=None if worst.share >= DEAR else Severity.ADVICE,
            notes=["each call pickles all that was there before, and every rank unpickles every rank's"],
            help="send what is new since the last call, or a window of fixed length (`items[-n:]`); better, reduce the few numbers that are reported",
        )


def _growth(event: Event) -> Growth | None:
    series = [s for s in event["series"] or () if len(s) == 4]
    if len(series) < 2 * NUM_BLOCKS or event.where is None or _is_new(event):
        return None
    means = _blocks([s[1] for s in series])
    rises = all(a < b for a, b in itertools.pairwise(means))
    middle = NUM_BLOCKS // 2
    if not rises or means[-1] < MIN_GROWTH * means[0] or means[-1] - means[middle] < LEVELS_OFF * (means[middle] - means[0]):
        return None
    half = series[len(series) // 2]
    span_s = series[-1][3] - half[3]
    share = (series[-1][2] - half[2]) / span_s if span_s > 0 else 0.0
    if series[-1][1] < (LARGE_BYTES if share >= DEAR else HUGE_BYTES):
        return None
    return Growth(event.where, str(event["op"]), int(series[-1][0]) + 1, series[0][1], series[-1][1], min(1.0, share))


def _is_new(event: Event) -> bool:
    """Whether the calls hold nothing of those before them."""
    held = event["held"]
    known = isinstance(held, list) and len(held) == 2 and all(isinstance(n, int) for n in held)
    return known and held[1] >= MIN_KNOWN and held[0] < MOSTLY_NEW * held[1]


def _blocks(values: Sequence[float]) -> list[float]:
    size = len(values) / NUM_BLOCKS
    parts = [values[int(i * size) : int((i + 1) * size)] for i in range(NUM_BLOCKS)]
    return [sum(p) / len(p) for p in parts]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"
