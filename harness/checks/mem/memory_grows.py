"""MEM103 memory-grows: memory climbs steadily while training goes on.

What it does
    Looks at resident memory (CUDA: allocated memory) at the end of every step after a warm-up of a fifth of the run and of the first pass
    over the data (which may fill a cache). The rest is cut into 8 blocks; the slope is the median of all slopes between the blocks'
    medians (Theil-Sen), its uncertainty half of their middle range. It grows where nearly every block is above the one before, the second
    half still grows, the slope is more than twice its uncertainty, the sum is over 20 MB, and the lowest value of a pass over the data rises
    from pass to pass. A warning from 50 steps and 1 second of
    training on, if at the present rate 10,000 steps took more than 1 GB and the sum is over 32 MB; else advice.

Why it is bad
    A list that is never emptied, a cache without a bound, tensors kept "for later": nothing fails until the kernel ends the process.

Wrong
    history.append((x, output.detach()))      # every batch, for ever

Right
    history.append(output.mean().item())
    deque(maxlen=100)

Known limits
    Needs 50 steps; shorter runs are inconclusive. A run that ends within its first pass over the data gives advice only. Pages of mapped
    files do not count. Which line allocates is a sample (10 a second), so the place is likely, not certain; where the training loop adds
    to one container only, that statement is named instead, and so is a `functools.lru_cache` without a bound that keeps tensors and was never
    hit. Advice only where a good part of what was gained is in deques with a bound that is not reached yet, or in blocks that were
    allocated before (`np.zeros`) and are touched for the first time, such as a replay buffer's, or was freed and is kept by malloc. Advice too where
    layers see ever new shapes, for each of which torch's library for CPUs prepares something and keeps it, and Python holds no more than before.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.mem import series
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run, number, where_of

MIN_STEPS, MIN_S = 50, 1.0
MIN_GROWTH = 20 * series.MB
WARN_GROWTH, WARN_SLOPE = 200 * series.MB, 2 * series.MB  # in all, and a step: no cache that fills up does both past the first pass
WARN_RATE = 1000 * series.MB / 10_000  # bytes a step
WARN_LEAST = 32 * series.MB  # a heap that settles: memory_growth without a probe gains 22 MB in 230 steps, and stops at 60 MB
UNFILLED = 0.25  # of the growth, told once at a growth of 8, 32 and 128 MB: what a replay buffer holds by then
FILLED, KEPT, HELD = 0.5, 0.5, 0.1  # of the growth by then: what is touched of old blocks, what malloc keeps, what the program holds
NEW_SHAPES, MIN_CALLS, STORED = 0.3, 16, 0.15  # of the calls; calls; of the growth between the first look and the last
WARM_UP = 0.2


class MemoryGrows(Check):
    code = "MEM103"
    name = "memory-grows"
    severity = Severity.WARNING
    explains = ("MEM105",)

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None and r.num_rows]
        if not trained:
            raise NotApplicable("no rank took an optimizer step")
        long = [(rank, r) for rank, r in trained if r.num_rows >= MIN_STEPS and _seconds(r) >= MIN_S]
        if not long:
            raise Inconclusive(f"needs {MIN_STEPS} steps and {MIN_S:g} s of training")
        growing = [(rank, r, t) for rank, r in long if (t := growth(r)) is not None]
        if not growing:
            return
        rank, recording, trend = max(growing, key=lambda item: item[2].slope)
        place, share = _line(recording)
        added = [
            w for e in recording.of("keepers")[-1:] if isinstance(e["statements"], list) for s in e["statements"] if (w := where_of(s))
        ]
        caches = _caches(recording)
        harmless = _harmless(recording, trend.growth)
        shapes = [] if harmless else _by_new_shapes(recording)
        if caches or harmless:
            added = []  # the cache grows by itself; what the loop adds to need not
        large = trend.growth >= WARN_GROWTH and trend.slope >= WARN_SLOPE
        strong = (trend.slope >= WARN_RATE or large) and trend.growth >= WARN_LEAST and _beyond_first_pass(recording)
        yield self.finding(
            f"memory grows by {_size(trend.slope)} a step: {_size(trend.growth)} since the warm-up",
            where=caches[0][0] if caches else added[0] if len(added) == 1 and not shapes else place,
            ranks=[rank for rank, _, _ in growing],
            severity=None if strong and not (harmless or shapes) else Severity.ADVICE,
            notes=[
                f"rank {rank}: slope {_size(trend.slope)} +- {_size(trend.error)} a step over {recording.num_rows} rows, "
                f"{trend.rising} of {trend.num_blocks - 1} blocks higher than the one before",
                *([f"{share:.0%} of the growth seen by sampling was at line {place.line}"] if place is not None else []),
                *(f"the lru_cache of `{w.function}` keeps {num} results and was never hit: tensors hash by identity" for w, num in caches),
                *harmless,
                *shapes,
                *([f"the loop adds to containers at lines {', '.join(str(w.line) for w in added)}"] if len(added) > (not shapes) else []),
            ],
            help=_help(bool(caches), bool(harmless), bool(shapes)),
        )


def _help(caches: bool, harmless: bool, shapes: bool) -> str:
    if shapes:
        return "pad to a few lengths, or set ONEDNN_PRIMITIVE_CACHE_CAPACITY; where it goes on all the same, look for a container that is never emptied"
    if harmless:
        return "nothing to mend where that fits into memory: it ends by itself"
    if caches:
        return "take the cache off this function, or key it by what repeats (a size, an index)"
    return "look for a container that is never emptied: keep numbers (`.item()`), bound it (`deque(maxlen=...)`), or clear it every epoch"


def _harmless(recording: Recording, growth: float) -> list[str]:
    """What ends by itself and is a good part of the growth, by the last look at what memory holds: empty where a leak is as likely."""
    looks = recording.of("keepers")
    told: list[str] = []
    unfilled = max((number(e["unfilled_bytes"]) for e in looks), default=0)
    if unfilled >= UNFILLED * growth:
        told.append(f"deque(maxlen=...) that are not full yet hold {_size(unfilled)} of it: it ends when they are")
    if looks and (grown := number(looks[-1]["grown"])) > 0:
        filled, held, kept = (number(looks[-1][name]) for name in ("filled", "held", "kept"))
        if filled >= FILLED * grown:
            where = "blocks that were allocated before and are touched for the first time"
            told.append(f"{_size(filled)} of {_size(grown)} were in {where}: it ends when they are full")
        elif kept >= KEPT * grown and held <= HELD * grown:
            where = "between small blocks that live on (MALLOC_MMAP_THRESHOLD_=65536 avoids it)"
            told.append(f"{_size(kept)} of {_size(grown)} were freed again and are kept by malloc, {where}")
    return told


def _by_new_shapes(recording: Recording) -> list[str]:
    """oneDNN keeps what it prepared for the last 1,024 shapes. Graphs that pile up hold tensors that Python does not know."""
    looks = recording.of("keepers")
    if len(looks) < 2 or recording.of("graphs") or recording.of("graphs_held") or not isinstance(shapes := looks[-1]["shapes"], list):
        return []
    (new, calls), more = shapes, number(looks[-1]["stored"]) - number(looks[0]["stored"])
    if calls < MIN_CALLS or new < NEW_SHAPES * calls or more > STORED * (number(looks[-1]["grown"]) - number(looks[0]["grown"])):
        return []
    return [
        f"{new} of {calls} calls brought a layer a shape that it had not seen: oneDNN keeps what it prepares for a shape, up to 1,024 of them, "
        f"and what Python is seen to hold has grown by {_size(max(0, more))}"
    ]


def _caches(recording: Recording) -> list[tuple[Where, int]]:
    """(cached function, results kept) of the caches that were never hit."""
    told = [e["caches"] for e in recording.of("keepers")[-1:] if isinstance(e["caches"], list)]
    pairs = [one for found in told for one in found if isinstance(one, list) and len(one) == 2]
    return [(where, num) for site, num in pairs if (where := where_of(site)) is not None and isinstance(num, int)]


def _seconds(recording: Recording) -> float:
    if recording.num_rows < 2:
        return 0.0
    return (recording.row(recording.num_rows - 1).t_ns - recording.row(0).t_ns) / 1e9


def growth(recording: Recording) -> series.Trend | None:
    """The trend, where it is a growth by the rules of this page."""
    steps, cuda = series.numbers(recording, "cuda_alloc_bytes")
    values: Sequence[float] = cuda if any(cuda) else series.numbers(recording, "rss_bytes")[1]
    skip = max(8, int(len(values) * WARM_UP))
    passed = _first_pass_steps(recording)
    first_pass = sum(map(passed.__gt__, steps))
    if len(steps) - first_pass >= 3 * series.BLOCKS:
        skip = max(skip, first_pass)
    found = series.trend(steps[skip:], values[skip:])
    if found is None or found.growth < MIN_GROWTH or not found.steady or _falls_back(recording, steps, values, found.growth):
        return None
    return found if any(cuda) or _anonymous(recording, found.growth) else None


def _falls_back(recording: Recording, steps: Sequence[int], values: Sequence[float], grown: float) -> bool:
    """Whether what grows in a pass over the data is given back by the next one: results that are kept for the end of an epoch, and the holes that
    they leave in the heap. A leak raises the lowest value of each pass as it raises the rest."""
    ends = sorted({e.step for e in recording.of("pass") if e["complete"] and e["backwards"]})
    passes = [[v for s, v in zip(steps, values, strict=True) if begin <= s < end] for begin, end in itertools.pairwise(ends)]
    lowest = [min(own) for own in passes if own]
    return len(lowest) >= 2 and lowest[-1] - lowest[0] < 0.25 * grown


def _first_pass_steps(recording: Recording) -> int:
    """Steps taken when the first training pass over a loader was complete; 0: there is no loader or no complete pass."""
    ends = [e.step for e in recording.of("pass") if e["complete"] and e["backwards"]]
    return min(ends, default=0)


def _beyond_first_pass(recording: Recording) -> bool:
    """Whether the trend rests on steps after the first pass; true where the script has no loader."""
    if not recording.of("loader"):
        return True
    done = _first_pass_steps(recording)
    return done > 0 and recording.num_steps - done >= 3 * series.BLOCKS


def _anonymous(recording: Recording, grown: float) -> bool:
    """Whether the process's own pages grew as well, not only those of mapped files; true where no samples tell."""
    samples = [
        s for e in recording.of("rss") if isinstance(e["samples"], list) for s in e["samples"] if isinstance(s, list) and len(s) == 3
    ]
    begun = recording.row(0).t_ns
    own = [s[1] - s[2] for s in samples if s[0] >= begun]
    return len(own) < 4 or max(own) - own[0] >= 0.5 * grown


def _line(recording: Recording) -> tuple[Where | None, float]:
    """The line that the main thread was in during most of the growth, and its share of it."""
    grown: dict[tuple[str, int], list[object]] = {}
    for event in recording.of("rss"):
        if event.step < 1 or not isinstance(event["grown"], list):
            continue
        for entry in event["grown"]:
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], int) and (where := where_of(entry[0])) is not None:
                known = grown.setdefault((where.file, where.line), [where, 0])
                known[1] = int(str(known[1])) + entry[1]
    if not grown:
        return None, 0.0
    sizes = {key: int(str(value[1])) for key, value in grown.items()}
    best = max(sizes, key=lambda key: sizes[key])
    found = grown[best][0]
    return (found if isinstance(found, Where) else None), sizes[best] / max(1, sum(sizes.values()))


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if abs(num_bytes) >= 1e6 else f"{num_bytes / 1e3:.1f} kB"
