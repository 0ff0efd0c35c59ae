"""PRF111 loader-workers-restarted: much of the time goes into starting the loader's workers anew for every short epoch, or every batch.

What it does
    Takes, of each complete pass over a loader with workers, the time in `iter(loader)`, the wait for the first batch beyond what a worker needs
    for one, and the time in which the workers are ended. Of an iterator that is let go of before its end (`next(iter(loader))` in every step): the
    time in which the workers are started, and ended among batches that nobody draws. Three tenths of the training time and more, over five passes and a second, are
    advice; two fifths, over ten passes and 1.5 seconds, a warning. Loops that are left by a `break` are never more than advice.

Why it is bad
    Without `persistent_workers=True` every `for batch in loader` forks (or spawns) all workers, and ends them. Where an epoch has few batches
    the run spends its time there.

Wrong
    DataLoader(dataset, num_workers=4)                               # 100 epochs of 5 batches

    for step in range(steps):
        x = next(iter(loader))

Right
    DataLoader(dataset, num_workers=4, persistent_workers=True)

    batches = iter(loader)                                           # kept, and made anew when it is through
    for step in range(steps):
        x = next(batches)

Known limits
    A loader that is made anew for each epoch gains nothing from it: make it once. What one batch costs a worker is estimated from above, so that
    slow datasets are not taken for slow starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number, where_of

KEEP_WORKERS = (
    "make the loader once, with persistent_workers=True (its workers keep their copy of the dataset: what the script sets on it at each "
    "epoch must reach them another way), or num_workers=0 where a sample costs next to nothing"
)
KEEP_ITERATOR = "keep the iterator: `batches = iter(loader)` before the loop, `next(batches)` in it, and a new one only when it is through"
MIN_PASSES, MIN_S, MIN_SHARE = 5, 1.0, 0.3
STRONG = (10, 1.5, 0.4)  # passes, seconds, share: a script that is tried out for a few short epochs is no reason to fail it


@dataclass
class Starts:
    """Passes over the loaders that one statement made; of iterators that are let go of after one batch: by the statement that makes them."""

    where: Where | None
    workers: int
    batches_drawn: str  # "all", "one" of more, "some"
    passes: int = 0
    batches: int = 0
    took_s: float = 0.0


class WorkersRestarted(Check):
    code = "PRF111"
    name = "loader-workers-restarted"
    severity = Severity.WARNING
    explains = ("PRF103",)

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None and r.num_rows]
        seen = [(rank, r, s) for rank, r in trained for s in _starts(r)]
        if not seen:
            raise NotApplicable("no rank trains with loader workers that are started for every pass")
        if max(s.passes for _, _, s in seen) < MIN_PASSES:
            raise Inconclusive(f"fewer than {MIN_PASSES} passes")
        found = [
            (s.took_s / wall_s, rank, wall_s, s)
            for rank, r, s in seen
            if (wall_s := _trained_s(r)) > 0 and s.passes >= MIN_PASSES and s.took_s >= max(MIN_S, MIN_SHARE * wall_s)
        ]
        if not found:
            return
        share, rank, wall_s, worst = max(found, key=lambda one: one[0])
        single = worst.batches_drawn == "one"
        strong = worst.batches_drawn != "some" and worst.passes >= STRONG[0] and worst.took_s >= STRONG[1] and share >= STRONG[2]
        yield self.finding(
            f"{min(share, 1.0):.0%} of the time goes into starting and ending {worst.workers} loader workers "
            + (f"for one batch each time, {worst.passes} times" if single else f"in each of {worst.passes} short epochs"),
            where=worst.where,
            ranks=sorted({one[1] for one in found}),
            severity=None if strong else Severity.ADVICE,
            notes=[
                f"rank {rank}: {worst.took_s:.1f} of {wall_s:.1f} s, {worst.took_s / worst.passes:.2f} s a pass of "
                f"{worst.batches / worst.passes:.0f} batches"
            ],
            help=KEEP_ITERATOR if single else KEEP_WORKERS,
        )


def _starts(recording: Recording) -> list[Starts]:
    loaders = {number(e["loop"], -1): e for e in recording.of("loader") if number(e["num_workers"]) and not e["persistent"]}
    found: dict[object, Starts] = {}
    for event in recording.of("pass"):
        loader = loaders.get(number(event["loop"], -1))
        took_s = _cost_s(event, number(loader["num_workers"])) if loader is not None else None
        if loader is None or took_s is None:
            continue
        looped = loader.where is not None and loader.where.text.lstrip().startswith(("for ", "async for "))
        drawn = "all" if event["complete"] else "one" if number(event["num_batches"]) == 1 and not looped else "some"
        where = (where_of(loader["made"]) if drawn != "one" else None) or loader.where
        one = found.setdefault((drawn, where.file, where.line) if where else drawn, Starts(where, number(loader["num_workers"]), drawn))
        one.passes += 1
        one.batches += number(event["num_batches"])
        one.took_s += took_s
    return list(found.values())


def _cost_s(event: Event, workers: int) -> float | None:
    """Seconds of this pass that workers, or an iterator, that are kept would not have cost."""
    times, num = event["times"], number(event["num_batches"])
    if not isinstance(times, list) or len(times) != 4 or not all(isinstance(t, (int, float)) for t in times) or num < 1:
        return None
    start_s, first_s, rest_s, end_s = times
    if not event["complete"]:
        return float(start_s + end_s)  # the wait for the first batch is left out: nothing tells what one costs
    return float(start_s + max(0.0, first_s - workers * rest_s / (num - 1)) + end_s) if num > 1 else None


def _trained_s(recording: Recording) -> float:
    """From the first training pass to the last step."""
    opened = [e.t_ns for e in recording.of("loader")]
    return (recording.row(recording.num_rows - 1).t_ns - opened[0]) / 1e9 if opened else 0.0
