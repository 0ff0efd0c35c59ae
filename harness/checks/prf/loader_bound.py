"""PRF103 loader-bound: training waits for its data.

What it does
    Takes the share of each step that was spent waiting for the data loader, without the time in which a rank waited for a core. More
    than half over at least 20 steps and 2 seconds is advice; more than 70 % over at least 50 steps and 10 seconds a warning. So are
    batches that take 30 ms, and samples that take half a millisecond, where most of the time goes there.

Why it is bad
    The processor or GPU stands still for most of the time that is paid for.

Wrong
    DataLoader(dataset, batch_size=64)                       # decodes in the training process

Right
    DataLoader(dataset, batch_size=64, num_workers=4, persistent_workers=True, pin_memory=True)

Known limits
    Judged only where ranks and workers have a core each. The first pass may read a cold disk. A loader that is no torch DataLoader is not
    seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.prf import pace
from harness.model import Finding, Severity
from harness.record import Recording, Run

WEAK, STRONG = (0.5, 20, 2.0), (0.7, 50, 10.0)  # share, steps, seconds
SLOW = (0.6, 2.0, 0.03)  # share, seconds, seconds a step: a batch that takes this long is no toy
SLOW_SAMPLE = (0.5, 1.0, 0.0005)  # share, seconds of waiting, seconds a sample: fetching and collating one from memory takes 0.02 ms


class LoaderBound(Check):
    code = "PRF103"
    name = "loader-bound"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None and r.num_rows and r.of("loader")]
        if not trained:
            raise NotApplicable("no rank trains from a torch DataLoader")
        shares = []
        for rank, recording in trained:
            wall = pace.column(recording, "wall_s")
            if sum(pace.column(recording, "data_s")) < WEAK[0] * sum(wall):
                data = [0.0] * len(wall)  # without the queue the share is smaller still
            else:
                wall, data = _without_queue(recording)
            if len(wall) >= WEAK[1] and sum(wall) >= WEAK[2]:
                shares.append((sum(data) / sum(wall), len(wall), sum(wall), rank, recording, sum(pace.column(recording, "num_samples"))))
        if not shares:
            raise Inconclusive(f"needs {WEAK[1]} steps and {WEAK[2]:g} s after the first {pace.WARM_UP_STEPS} steps")
        share, steps, seconds, rank, recording, samples = max(shares, key=lambda s: s[0])
        if share < WEAK[0]:
            return
        pace.require_cores(run)
        strong = share >= STRONG[0] and steps >= STRONG[1] and seconds >= STRONG[2]
        slow = share >= SLOW[0] and seconds >= SLOW[1] and share * seconds / steps >= SLOW[2]
        waited = share * seconds
        slow = slow or (share >= SLOW_SAMPLE[0] and waited >= SLOW_SAMPLE[1] and waited >= SLOW_SAMPLE[2] * samples > 0)
        loader = recording.of("loader")[-1]
        workers = int(loader["num_workers"] or 0)
        yield self.finding(
            f"{share:.0%} of the time goes into waiting for data",
            where=loader.where,
            ranks=[s[3] for s in shares if s[0] >= WEAK[0]],
            severity=None if strong or slow else Severity.ADVICE,
            notes=[f"rank {rank}: {share * seconds:.1f} of {seconds:.1f} s over {steps} steps, num_workers={workers}"],
            help="raise num_workers (with persistent_workers=True), cache what is decoded, or make the dataset cheaper",
        )


def _without_queue(recording: Recording) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of it at least in the data loader, without what the rank waited for a core: that is the host's doing."""
    wall_s, queue_s = pace.column(recording, "wall_s"), pace.column(recording, "queue_s")
    data_s, self_s, before_s = (pace.column(recording, name) for name in ("data_s", "self_s", "self_queue_s"))
    wall = [max(0.0, w - q) for w, q in zip(wall_s, queue_s, strict=True)]
    data = []
    for waited, own, before, queue in zip(data_s, self_s, before_s, queue_s, strict=True):
        data.append(
            max(0.0, waited - (before if waited <= own else queue))
        )  # further batches of an accumulated step come after its first backward
    return wall, data
