"""What is reduced behind an evaluation and is nothing that it measured: a training loss, or what a hook logs every few steps anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from harness.checks.evl import evaluations, measured, reductions
from harness.checks.evl.reductions import Reduction
from harness.record import Run, number

MAX_WINDOW = 256  # steps since a logged loss was last set to zero


def goes_without(one: Reduction, run: Run) -> bool:
    """The same calls lead to the same statement also where nothing was measured since the last training step. Not where they did so as often at
    this very step, before the evaluation: a loop over phases reduces what each of them counted, and hooks that log come as often at each step."""
    way = number(one.events[0]["way"])
    alike = [r for r in reductions.aligned(run) if r.where == one.where and number(r.events[0]["way"]) == way] if way else []
    without = Counter(r.step(0) for r in alike if r is not one and not _measured_before(r, run))
    return without[one.step(0)] < max(without.values(), default=0)


def _measured_before(one: Reduction, run: Run) -> bool:
    step, t = one.step(0), one.at_t(0)
    return any(e.step == step and e.opened_ns < t for e in evaluations.by_rank(run)[0]) or any(
        m.at == step and m.first_t < t for m in measured.of_rank(run, 0)
    )


def are_losses(local: Sequence[float], one: Reduction, run: Run) -> bool:
    """On every rank the loss of its last training step, or the sum or the mean of as many of its last ones."""
    sums = [_sums(run, rank, one.step(rank)) for rank in range(len(local))]
    return any(
        all(_near(v, own[k] / n) for v, own in zip(local, sums, strict=True)) for k in range(min(map(len, sums), default=0)) for n in {1, k + 1}
    )


def _sums(run: Run, rank: int, step: int) -> list[float]:
    """The loss of the step before this one, the sum of the last two, and so on, while there is a row of each."""
    recording = run.ranks[rank]
    if recording is None:
        return []
    rows = zip(recording.column("step"), recording.column("loss"), strict=True)
    known = {int(at): float(loss) for at, loss in rows if step - MAX_WINDOW <= at < step}
    last: list[float] = []
    while (at := step - 1 - len(last)) in known:
        last.append(known[at])
    return list(accumulate(last))


def _near(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= 1e-5 * max(abs(value), abs(wanted))
