"""PRF108 file-reloaded: one file is loaded whole again and again while training waits

What it does
    Counts and times the calls of torch.load and the arrays that numpy.load reads (of an .npz when they are asked for) by file and statement. 32 and
    more loads of one file by one statement, in several steps and at least four in each pass over the data, that together with those of other
    files by the same function take over half a second and over a quarter of the training time are a warning at that statement.

Why it is bad
    A dataset that reads its whole file for every item spends a batch's time on copies of what is in memory already; on a shared file
    system all ranks do so at once.

Wrong
    def __getitem__(self, i):
        return torch.load(self.path)["x"][i]

Right
    def __init__(self, path):
        self.x = torch.load(path)["x"]

    def __getitem__(self, i):
        return self.x[i]

Known limits
    Other readers (json, pickle, pandas) are not followed, nor is what the workers of a loader read.
    A file that is mapped (`mmap=True`) costs little and stays silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.prf import pace
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number

MIN_STEPS, MIN_S, MIN_SHARE, A_PASS, EVERY_STEP = 4, 0.5, 0.25, 4, 0.8


class FileReloaded(Check):
    code = "PRF108"
    name = "file-reloaded"
    severity = Severity.WARNING
    explains = ("PRF102", "PRF103", "PRF104")

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r, sum(pace.column(r, "wall_s"))) for rank, r in enumerate(run.ranks) if r is not None and r.num_rows]
        if not trained:
            raise NotApplicable("no rank took an optimizer step")
        slow = [
            (took_s, wall_s, rank, again)
            for rank, recording, wall_s in trained
            for again in _by_function(recording)
            if (took_s := sum(_whole_s(e, recording) for e in again)) >= max(MIN_S, MIN_SHARE * wall_s)
        ]
        if not slow:
            return
        took_s, wall_s, rank, again = max(slow, key=lambda s: s[0])
        event = max(again, key=lambda e: e["took_s"])
        files = sorted({str(e["path"]).rpartition("/")[2] for e in again})
        num = sum(e["num"] for e in again if e.where == event.where)
        yield self.finding(
            f"the same file is loaded whole {event['num']} times and more by this statement"
            if len(files) == 1
            else f"the same {len(files)} files are loaded whole {num} times and more by this statement",
            where=event.where,
            ranks=sorted({s[2] for s in slow}),
            notes=[f"rank {rank}: {took_s:.1f} s of {wall_s:.1f} s of training went into loading {', '.join(files[:4])}"],
            help="load it once, in the dataset's `__init__` or behind a `functools.lru_cache`, and index what is in memory (or map the file)",
        )


def _whole_s(event: Event, recording: Recording) -> float:
    """What it took until it was told last, at a power of two of calls; of one that comes in every step, to the end of the run at that rate."""
    told = float(event["took_s"])
    steady = EVERY_STEP * (event.step + 1) <= number(event["steps"]) <= event.step + 2
    return told * max(1.0, recording.num_steps / (event.step + 1)) if steady else told


def _by_function(recording: Recording) -> list[list[Event]]:
    """What each function of the script loaded in several steps, by file and statement; the last that was told. A file for each sample, read once
    in each pass, is not loaded again."""
    least = A_PASS * max(1, len(recording.of("loader")))
    last = {(e["path"], e.where): e for e in recording.of("reload") if e["steps"] >= MIN_STEPS and e["num"] >= least and e.where is not None}
    found: dict[tuple[str, str], list[Event]] = {}
    for event in last.values():
        if event.where is not None:
            found.setdefault((event.where.file, event.where.function), []).append(event)
    return list(found.values())
