"""OPT104 scheduler-stepped-too-often: the scheduler is stepped several times an optimizer step

What it does
    Counts scheduler steps between optimizer steps. As many as there are ranks is a warning; advice where the schedule was made long enough to
    last all the same, or, of a function whose length is not known, where the learning rate comes down at the end of the run and no sooner. As
    many as there are backwards in the step, one for each micro-batch, is a warning where the schedule was made for the optimizer's steps: its
    length says so, or the learning rate is 0 for the last fifth of the run and longer.

Why it is bad
    A schedule meant for N steps ends after a fraction of them: the learning rate decays too fast, and the rest of the run trains nothing.

Wrong
    for _ in range(world_size): scheduler.step()

Right
    scheduler.step()                      # once an optimizer step, beside optimizer.step()

Known limits
    A schedule that is stepped once an epoch is healthy and silent; so is one a step for each of several schedulers, and one that is counted
    in micro-batches and made for them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run

MOST, MIN_STEPS = 0.9, 3  # share of the steps, and steps, that have to show it
MIN_RATES, NEAR_ZERO = 20, 0.05  # steps of a course that is judged; share of its peak
OVER = 0.2  # of the steps, at the end, with a learning rate of 0


class SchedulerTooOften(Check):
    code = "OPT104"
    name = "scheduler-stepped-too-often"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        stepped = [(rank, r, r.of("scheduler")) for rank, r in enumerate(run.ranks) if r is not None and r.of("scheduler")]
        if not stepped:
            raise NotApplicable("no learning rate scheduler is stepped")
        for _, recording, own in stepped:
            often, shown = _times_a_step(own)
            if often < 2:
                continue
            if often == run.world_size and (_backwards(recording) != often or _at_once(own)):
                if run.live and _of_no_known_length(run, recording, own):
                    continue  # how it ends is not seen yet
                yield self._each_rank(run, recording, own, shown)
            elif _backwards(recording) == often:
                yield from self._each_micro_batch(run, recording, own, often, shown)
            else:
                continue
            return

    def _each_rank(self, run: Run, recording: Recording, own: list[Event], shown: str) -> Finding:
        unknown, rates = _of_no_known_length(run, recording, own), _rates(recording, own)
        total = 0 if unknown else _total(recording, own)
        lasts = _ends_with_the_run(rates) if unknown else total >= 0.9 * run.world_size * recording.num_steps
        made_for = f"it was made for {total}" if total else "the learning rate comes down at the end of the run and no sooner"
        return self.finding(
            f"the scheduler is stepped {run.world_size} times an optimizer step, once for each rank"
            + ("" if lasts else f": its schedule ends {run.world_size} times too early"),
            severity=Severity.ADVICE if lasts else None,
            where=own[-1].where,
            ranks=run.rank_ids,
            notes=[shown, *([f"{made_for}: long enough, if that counts all ranks' steps"] if lasts else _course(rates))],
            help="step the scheduler once an optimizer step; every rank has a scheduler of its own",
        )

    def _each_micro_batch(self, run: Run, recording: Recording, own: list[Event], often: int, shown: str) -> Iterable[Finding]:
        steps, total, idle = recording.num_steps, _total(recording, own), _steps_at_zero(recording)
        made_for_steps = 0.8 * steps <= total <= 1.25 * steps
        if not made_for_steps and idle < max(MIN_STEPS, OVER * steps):
            return
        told = f"it was made for {total} steps and the run took {steps}" if made_for_steps else f"the learning rate is 0 in the last {idle} of {steps} steps"
        yield self.finding(
            f"the scheduler is stepped {often} times an optimizer step, once for each micro-batch: its schedule ends {often} times too early",
            where=own[-1].where,
            ranks=run.rank_ids,
            notes=[shown, told],
            help="call scheduler.step() beside optimizer.step(), or make the schedule for the number of micro-batches",
        )


def _times_a_step(own: list[Event]) -> tuple[int, str]:
    """(how often one scheduler is stepped for each optimizer step, 0 where that varies; in words)."""
    counts: Counter[tuple[object, int]] = Counter((e["id"], e.step) for e in own if e.step > 0)
    if not counts:
        return 0, ""
    often, times = Counter(counts.values()).most_common(1)[0]
    return (often if times >= max(MIN_STEPS, MOST * len(counts)) else 0), f"{times} of {len(counts)} steps"


def _at_once(own: list[Event]) -> bool:
    """The steps of the scheduler that belong to one optimizer step have no backward between them: they are not those of micro-batches."""
    found: dict[tuple[object, int], set[object]] = {}
    for e in own:
        found.setdefault((e["id"], e.step), set()).add(e["backwards"])
    one = sum(len(counts) == 1 and isinstance(next(iter(counts)), int) for counts in found.values())
    return one >= max(MIN_STEPS, MOST * len(found))


def _of_no_known_length(run: Run, recording: Recording, own: list[Event]) -> bool:
    """A function of the script's, and what it has bound is no length: nothing, the number of ranks, or far less than was run."""
    return own[-1]["kind"] == "LambdaLR" and _total(recording, own) <= max(run.world_size, 0.4 * recording.num_steps)


def _rates(recording: Recording, own: list[Event]) -> list[float]:
    """Learning rates of the scheduler's optimizer, step by step."""
    opt = own[-1]["opt"]
    return [lr for of, lr in zip(recording.column("opt"), recording.column("lr"), strict=True) if of == opt or not isinstance(opt, int) or opt < 0]


def _ends_with_the_run(rates: list[float]) -> bool:
    """It never climbs again behind its peak, is well above nothing in the middle of the run, and near it only at the end."""
    if len(rates) < MIN_RATES:
        return False
    top = max(rates)
    behind = rates[rates.index(top) :]
    falls = all(b <= a + 1e-9 * top for a, b in pairwise(behind))
    return falls and rates[-1] <= NEAR_ZERO * top < 0.3 * top <= rates[len(rates) // 2] and rates[-1] < rates[int((1 - OVER) * len(rates))]


def _course(rates: list[float]) -> list[str]:
    """That the rate comes down and climbs again, in words."""
    top = max(rates, default=0.0)
    low = min(range(rates.index(top), len(rates)), key=rates.__getitem__) if rates else 0
    again = max(rates[low:], default=0.0)
    climbs = again > 0.5 * top and rates[low] <= NEAR_ZERO * top
    return [f"the learning rate falls to {rates[low]:.3g}, and climbs to {again:.3g} again"] if climbs else []


def _backwards(recording: Recording) -> int:
    backwards = recording.column("num_backward")
    return int(statistics.median(backwards)) if len(backwards) else 0


def _steps_at_zero(recording: Recording) -> int:
    """How many steps at the end were taken with a learning rate of 0, where there were others before."""
    rates = list(recording.column("lr"))
    idle = next((i for i, lr in enumerate(reversed(rates)) if lr != 0), 0)
    return idle if any(rates) else 0


def _total(recording: Recording, own: list[Event]) -> int:
    """The length that the schedule was made for; 0: not known."""
    ids = {e["id"] for e in own}
    return max((n for e in recording.of("scheduler_made") if e["id"] in ids for n in e["totals"] or () if isinstance(n, int)), default=0)
