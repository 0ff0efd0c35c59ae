"""PRF101 sync-every-micro-batch: with gradient accumulation, every micro-batch all-reduces the whole model.

What it does
    Counts the backwards between two optimizer steps and those in which DDP's reducer communicated. Two or more from one line, all of them
    communicating, is a warning: only the last one needs to.

Why it is bad
    The result is right, the communication is A times what is needed. On a slow network accumulation then saves nothing.

Wrong
    for i, batch in enumerate(loader):
        (criterion(model(x), y) / A).backward()
        if (i + 1) % A == 0: optimizer.step(); optimizer.zero_grad()

Right
    last = (i + 1) % A == 0
    with contextlib.nullcontext() if last else model.no_sync():
        (criterion(model(x), y) / A).backward()          # the forward inside it too: no_sync acts there

Known limits
    Several losses from different lines for one step are no accumulation. A loop over several losses of one batch looks like micro-batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, where_of

MIN_STEPS = 3


class SyncEveryMicroBatch(Check):
    code = "PRF101"
    name = "sync-every-micro-batch"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(True for _ in run.events("wrap")) or run.world_size < 2:
            raise NotApplicable("no DistributedDataParallel in a job of several ranks")
        seen = [(rank, r, accumulated(r)) for rank, r in enumerate(run.ranks) if r is not None and r.of("wrap")]
        if not any(steps for _, _, steps in seen):
            raise NotApplicable("no gradient accumulation: one backward a step")
        told = [(rank, r, steps) for rank, r, steps in seen if steps]
        if max(len(steps) for _, _, steps in told) < MIN_STEPS:
            raise Inconclusive(f"fewer than {MIN_STEPS} steps with accumulation")
        wasteful = [
            (rank, r, w) for rank, r, steps in told if len(w := [s for s in steps if s[1] >= s[0]]) >= max(MIN_STEPS, 0.7 * len(steps))
        ]
        if not wasteful:
            return
        rank, recording, steps = wasteful[0]
        backwards = int(statistics.median(s[0] for s in steps))
        no_sync = recording.of("no_sync")
        yield self.finding(
            f"gradients are all-reduced {backwards} times a step, once for every micro-batch",
            where=no_sync[0].where if no_sync else steps[0][2],
            ranks=[r for r, _, _ in wasteful],
            notes=[
                f"{backwards} backwards and {backwards} gradient all-reduces a step on rank {rank}, over {len(steps)} steps",
                *(["no_sync() is entered, but only around backward: it acts in the forward"] if no_sync else []),
                *_bytes(recording, backwards),
            ],
            help="run forward and backward of all but the last micro-batch inside `with model.no_sync():`",
        )


def accumulated(recording: Recording) -> list[tuple[int, int, Where | None]]:
    """(backwards, reducing backwards, site) of each step whose backwards all came from one line, two or more, each with a forward of its own."""
    places = {step: i for i, step in enumerate(recording.column("step")[:64])}
    found = []
    for event in recording.of("accumulation"):
        site, num = _only_site(event)
        if num < 2 or event.step not in places:
            continue
        row = recording.row(places[event.step])
        if row.num_backward != num or row.num_forward < num:
            continue
        found.append((num, row.num_reduce, site))
    return found


def _only_site(event: Event) -> tuple[Where | None, int]:
    """The one line that all backwards since the gradients were zero came from; 0 where there are several."""
    sites = event["sites"]
    if (
        not isinstance(sites, list)
        or len(sites) != 1
        or not isinstance(sites[0], list)
        or len(sites[0]) != 2
        or not isinstance(sites[0][1], int)
    ):
        return None, 0
    return where_of(sites[0][0]) or event.where, sites[0][1]


def _bytes(recording: Recording, backwards: int) -> list[str]:
    numels = recording.of("wrap")[0]["numels"]
    total = sum(n for n in numels if isinstance(n, int)) * 4 if isinstance(numels, list) else 0
    return [f"about {total * backwards / 1e6:.1f} MB a step instead of {total / 1e6:.1f} MB"] if total else []
