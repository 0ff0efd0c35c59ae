"""PRF109 checkpoint-every-step: a checkpoint is written in every training step.

What it does
    Looks for twenty and more optimizer steps in a row with a torch.save in nearly each, and for the time that it took. 15 % of the time of
    those steps and more is a warning at the statement.

Why it is bad
    The rank that writes holds up all others in their next all-reduce: the run takes as long as the disk does. It mostly is a condition that
    tests the wrong number (`epoch % every` where `step % every` was meant).

Wrong
    for batch in loader:
        ...
        if rank == 0 and epoch % args.save_every == 0:
            torch.save(state, path)

Right
        if rank == 0 and step % args.save_every == 0:
            torch.save(state, path)

Known limits
    Advice where each epoch has one step (a full batch): the epochs are saved. Files that are not written by torch.save are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run

MIN_STEPS, MIN_FILLED, MIN_SHARE, MIN_S = 20, 0.9, 0.15, 0.3


@dataclass(frozen=True)
class Series:
    """Steps in a row with a save in nearly each."""

    where: Where
    steps: list[int]  # with a save, in order
    took_s: float
    span_s: float

    @property
    def share(self) -> float:
        return self.took_s / self.span_s if self.span_s > 0 else 0.0


class SavesEveryStep(Check):
    code = "PRF109"
    name = "checkpoint-every-step"
    severity = Severity.WARNING
    explains = ("PRF102", "PRF104")

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None and r.num_rows]
        if not any(r.of("save") for _, r in trained):
            raise NotApplicable("no rank trains and saves")
        found = [(rank, r, one) for rank, r in trained for one in _series(r) if one.share >= MIN_SHARE and one.took_s >= MIN_S]
        if not found:
            return
        rank, recording, worst = max(found, key=lambda one: one[2].took_s)
        first, last = worst.steps[0], worst.steps[-1]
        yield self.finding(
            f"a checkpoint is written in every step: {len(worst.steps)} in steps {first} to {last}, {worst.share:.0%} of their time",
            where=worst.where,
            ranks=sorted({r for r, _, one in found if one.where == worst.where}),
            severity=Severity.ADVICE if _epochs_of_one_step(recording, worst) else None,
            notes=[f"rank {rank}: {worst.took_s:.1f} of {worst.span_s:.1f} s went into torch.save; the other ranks wait for it"],
            help="save every so many steps or once an epoch: look at the condition around it",
        )


def _series(recording: Recording) -> list[Series]:
    """Of each statement the longest stretch without a gap of over two steps."""
    begun: dict[str, Event] = {}
    saves: dict[tuple[str, int], list[tuple[Event, Event]]] = {}
    for event in recording.of("save"):
        if not event["path"] or event.where is None or event.step < 1:
            continue
        if not event["done"] and not event["error"]:
            begun[event["path"]] = event
        elif (first := begun.pop(event["path"], None)) is not None and event["done"]:
            saves.setdefault((event.where.file, event.where.line), []).append((first, event))
    return [one for pairs in saves.values() if (one := _longest(pairs)) is not None]


def _longest(pairs: list[tuple[Event, Event]]) -> Series | None:
    stretches: list[list[tuple[Event, Event]]] = [[pairs[0]]]
    for pair in pairs[1:]:
        if pair[0].step - stretches[-1][-1][0].step > 2:
            stretches.append([])
        stretches[-1].append(pair)
    best = max(stretches, key=len)
    steps = sorted({first.step for first, _ in best})
    where = best[0][0].where
    if where is None or len(steps) < MIN_STEPS or len(steps) < MIN_FILLED * (steps[-1] - steps[0] + 1):
        return None
    took_s = sum(done.t_ns - first.t_ns for first, done in best) / 1e9
    return Series(where, steps, took_s, (best[-1][1].t_ns - best[0][0].t_ns) / 1e9)


def _epochs_of_one_step(recording: Recording, one: Series) -> bool:
    """A pass over a loader ends with nearly every step."""
    ended = {e.step for e in recording.of("pass") if e["backwards"] and e.step in range(one.steps[0], one.steps[-1] + 1)}
    return len(ended) >= 0.8 * len(one.steps)
