"""OPT123 schedule-without-effect: the scheduler drives an optimizer that no longer steps

What it does
    At every step of a learning-rate scheduler, looks whether its optimizer has stepped since the last one. Where another optimizer with
    the same parameters steps in its place, at a learning rate that never moves and that no scheduler touches, to the end of the run, the
    schedule has no effect.

Why it is bad
    The optimizer that trains keeps its first learning rate: no warm-up, no decay. `get_last_lr()` shows the old schedule all the same.

Wrong
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    optimizer = AdamW(model.parameters(), lr=1e-3)      # the scheduler keeps the one that it was given

Right
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)

Known limits
    Needs four steps of such a scheduler. Optimizers of different parameters, of which one rests for a phase, are healthy and silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, where_of

MIN_IDLE = 4


class ScheduleWithoutEffect(Check):
    code = "OPT123"
    name = "schedule-without-effect"
    severity = Severity.ERROR
    explains = ("OPT104",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(True for _ in run.events("scheduler")):
            raise NotApplicable("no learning rate scheduler is stepped")
        hits = [(rank, e) for rank, r in enumerate(run.ranks) if r is not None and (e := _idle(r)) is not None]
        if not hits:
            return
        rank, first = hits[0]
        made, event = where_of(first["made"]), optimizers.params_event(run, rank, first["beside"])
        lr = next(iter(_lrs(run.ranks[rank], first)), 0.0)
        kind = event["kind"] if event is not None else "other"
        yield self.finding(
            f"the {first['kind']} drives an optimizer that no longer steps: the {kind} that trains the same parameters keeps lr {lr:g}",
            where=(event.where if event is not None else None) or made or first.where,
            ranks=[r for r, _ in hits],
            notes=[f"the scheduler was made at line {made.line}, and is stepped from step {first.step} on"] if made is not None else [],
            help="make the scheduler after the optimizer that it is to drive, and anew whenever the optimizer is",
        )


def _idle(recording: Recording) -> Event | None:
    """The first step of a scheduler whose optimizer rests to the end, while another one has its parameters and a constant lr."""
    for key in dict.fromkeys(repr(e["id"]) for e in recording.of("schedule_idle")):
        idle = [e for e in recording.of("schedule_idle") if repr(e["id"]) == key]
        first = idle[0]
        moved = len({e["lr"] for e in recording.of("scheduler") if repr(e["id"]) == key and e.t_ns >= first.t_ns}) > 1
        if len(idle) < MIN_IDLE or len({e["beside"] for e in idle}) != 1 or not moved or not isinstance(first["beside"], int):
            continue
        others = {repr(e["id"]) for e in recording.of("scheduler") if e.t_ns > first.t_ns} - {key}
        own = {e["opt"] for e in recording.of("scheduler") if repr(e["id"]) in others}
        if first["beside"] in own or len(set(_lrs(recording, first))) != 1 or _resumes(recording, idle):
            continue
        return first
    return None


def _lrs(recording: Recording | None, first: Event) -> list[float]:
    """Learning rates of the optimizer that steps, from the first idle step of the scheduler on."""
    if recording is None:
        return []
    table = zip(recording.column("opt"), recording.column("t_ns"), recording.column("lr"), strict=True)
    return [lr for opt, t, lr in table if opt == first["beside"] and t >= first.t_ns]


def _resumes(recording: Recording, idle: list[Event]) -> bool:
    """The scheduler's optimizer steps again later."""
    own = {e["opt"] for e in recording.of("scheduler") if repr(e["id"]) == repr(idle[0]["id"])} - {None, -1}
    return any(t > idle[0].t_ns and o in own for o, t in zip(recording.column("opt"), recording.column("t_ns"), strict=True))
