"""OPT128 never-stepped: gradients are computed and no optimizer is ever stepped

What it does
    At the end of a run in which no process took a step, asks whether an optimizer had been made and its parameters got gradients in 8
    backwards or more. An error: nothing was trained.

Why it is bad
    The loop runs, the loss is printed, and no parameter moves: the condition of the step never holds, the accumulation is longer than an epoch
    and starts anew with each, or the call was lost.

Wrong
    for step, batch in enumerate(loader):                     # 6 batches
        loss(batch).backward()
        if (step + 1) % 8 == 0: optimizer.step()              # never

Right
    if (step + 1) % 8 == 0 or step + 1 == len(loader): optimizer.step()

Known limits
    A script that makes no optimizer may compute gradients for their own sake and is silent. So is one that steps another optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run, where_of


class NeverStepped(Check):
    code = "OPT128"
    name = "never-stepped"
    severity = Severity.ERROR
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live:
            raise NotApplicable("the run is not at its end")
        if any(process.num_rows for process in run.processes):
            return
        waiting = [(rank, r.of("not_stepped")) for rank, r in enumerate(run.ranks) if r is not None and r.of("not_stepped")]
        if not waiting:
            raise NotApplicable("no optimizer waits for its first step")
        last = [(rank, events[-1]) for rank, events in waiting if events[-1]["graded"]]
        if not last or not run.finished:
            return
        event = last[0][1]
        yield self.finding(
            f"the {event['kind']} is never stepped: {event['backwards']} backwards and more gave its parameters gradients, and none was used",
            where=where_of(event["at"]) or where_of(event["made"]) or event.where,
            ranks=[rank for rank, _ in last],
            notes=[f"{event['graded']} of its parameters have a gradient", *([f"computed at {event.where.place}"] if event.where else [])],
            help="see when the condition around optimizer.step() holds: a window longer than an epoch that starts anew with each never ends",
        )
