"""OPT127 schedule-for-whole-dataset: the schedule was made for the steps of one process, and each rank takes only its share of them

What it does
    Compares the length of a schedule that is stepped at every batch with the steps of a run that was complete: as many as the whole data
    set has batches, times the epochs that were run, where the rank's own loader has a world_size-th of them.

Why it is bad
    The learning rate ends in the middle of its schedule: near its maximum with OneCycleLR, never small with a cosine.

Wrong
    steps = epochs * (len(dataset) // batch_size)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)

Right
    steps = epochs * len(loader)          # the loader of this rank
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)

Known limits
    The length is known of torch's schedulers and of lambdas that have it bound. Where the numbers fit a run of fewer epochs than were
    planned just as well, it is advice. Runs that end their epochs early are not judged, nor sessions that hand the schedule on to a later one.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.opt import optimizers
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number


class LongSchedule(Check):
    code = "OPT127"
    name = "schedule-for-whole-dataset"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2:
            raise NotApplicable("one process")
        if run.live or any(e.code for e in run.ending.exits):
            raise NotApplicable("the run did not come to its end")
        if run.over or any(r.of("load_scheduler") for r in run.present):
            raise NotApplicable("the schedule goes on in another session, or did not begin in this one")
        found = next(((r, made) for r in run.present if (made := _made(r)) is not None), None)
        if found is None:
            raise NotApplicable("no schedule of known length is stepped at every batch")
        recording, made = found
        drawn = [p for p in passes.training(run) if p.rank == recording.rank]
        if not _complete(run, recording, drawn):
            raise NotApplicable("the training passes are not complete, or not sharded")
        steps = recording.num_steps
        whole, doubtful = _whole(run, drawn, steps)
        total = next((n for n in made["totals"] if n in whole), 0)
        if total <= 1.4 * steps:
            return
        yield self.finding(
            f"the schedule was made for {total} steps and {steps} are taken: it counts the whole data set, and each of {run.world_size} ranks has "
            "its share of it",
            where=made.where,
            ranks=run.rank_ids,
            notes=[f"{len(drawn)} passes of {drawn[0].num_batches} batches a rank; the learning rate ends at {recording.column('lr')[-1]:.3g}"],
            help="count the batches of this rank: `epochs * len(loader)`",
            severity=Severity.ADVICE if doubtful and made["asked"] else None,
        )


def _made(recording: Recording) -> Event | None:
    """The one schedule that is stepped with every optimizer step."""
    ids = {e["id"] for e in recording.of("scheduler")}
    made = [e for e in recording.of("scheduler_made") if e["id"] in ids and isinstance(e["totals"], list) and e["totals"]]
    if len(ids) != 1 or not made or len(optimizers.rows_of(recording)) != 1:
        return None
    stepped, last = recording.column("sched")[-1], recording.column("step")[-1]
    return made[-1] if abs(stepped - last) <= 1 else None


def _complete(run: Run, recording: Recording, drawn: list[Pass]) -> bool:
    """All training passes are of one loader, whole, and a world_size-th of the data; no way leads out of the loop of epochs."""
    if not drawn or len({(p.key, p.num_batches, p.dataset_len) for p in drawn}) != 1 or not all(p.exhausted for p in drawn):
        return False
    first = drawn[0]
    size, share = _batch_size(first), first.dataset_len / run.world_size
    if size < 1 or first.num_batches < 2 or abs(first.num_samples - share) > size:
        return False
    exits = [x for e in recording.of("loop") if e.where == first.where for x in e["exits"] or ()]
    return not any(number(x.get("level")) > 0 and x.get("kind") in ("break", "return") for x in exits if isinstance(x, dict))


def _batch_size(one: Pass) -> int:
    sizes = one.closed["batch_sizes"] if one.closed is not None else None
    return number(sizes[0]) if isinstance(sizes, list) and sizes else 0


def _whole(run: Run, drawn: list[Pass], steps: int) -> tuple[set[int], bool]:
    """(steps that these epochs over the whole data set would take, whether a multiple of the rank's own is the same number)."""
    size, epochs = _batch_size(drawn[0]), len(drawn)
    micro = max(1, round(epochs * drawn[0].num_batches / max(1, steps)))
    batches = {drawn[0].dataset_len // size, -(-drawn[0].dataset_len // size)}
    found = {n for b in batches for n in (epochs * (b // micro), epochs * -(-b // micro), epochs * b // micro)}
    return found, any(n % steps == 0 for n in found)
