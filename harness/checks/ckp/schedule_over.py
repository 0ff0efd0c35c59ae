"""CKP113 schedule-starts-over: after a resume the learning rate runs through the beginning of its schedule again.

What it does
    Compares the learning rates of the steps that follow `optimizer.load_state_dict` with those of the first steps of the run. The same
    course of at least three different values, where the loaded state held another rate, means that the position in the schedule was
    not restored.

Why it is bad
    Every resume brings another warm-up, or a rate from the beginning of the decay; training is another one than without the interruption.

Wrong
    optimizer.load_state_dict(checkpoint["optimizer"])
    epoch = checkpoint["epoch"]                       # the step that the schedule is made of is left out

Right
    optimizer.load_state_dict(checkpoint["optimizer"])
    epoch, step = checkpoint["epoch"], checkpoint["step"]

Known limits
    Needs a first part of training in the same run. A rate that the source computes from a remainder (`step % cycle`), a constant one, a new rate
    for a new phase, and a scheduler that goes on or was restored are healthy. Where nothing else shows that training goes on, it is advice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number

MIN_STEPS, MIN_RATES, LOOKED_AT = 4, 3, 256


class ScheduleStartsOver(Check):
    code = "CKP113"
    name = "schedule-starts-over"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [(rank, r, e) for rank, r in enumerate(run.ranks) if r is not None for e in r.of("load_optimizer") if number(e.step) > 0]
        if not loads:
            raise NotApplicable("no optimizer state is loaded after training has begun")
        for rank, recording, load in loads:
            again = _again(recording, load)
            if again is None or load["cyclic"] or _scheduler_goes_on(recording, load):
                continue
            yield self.finding(
                f"after the resume the learning rate starts over: {again[0]:.3g}, as in the first steps of the run; the loaded optimizer "
                f"had {load['lr']:.3g}",
                where=load.where,
                ranks=run.rank_ids,
                notes=[f"{again[1]} steps repeat the course of the first ones", *_stored(recording, load)],
                help="restore what the schedule is made of as well: the scheduler's state, or the step count",
                severity=None if _goes_on(rank, recording, load) else Severity.ADVICE,
            )
            return


def _again(recording: Recording, load: Event) -> tuple[float, int] | None:
    """(rate of the first step after a load, number of steps that repeat the first ones of the run)."""
    step, given = number(load.step), load["lr"]
    steps, opts, rates = recording.column("step"), recording.column("opt"), recording.column("lr")
    after = _rates([(opts[i], rates[i]) for i in range(len(steps)) if steps[i] >= step])
    first = _rates([(opts[i], rates[i]) for i in range(len(steps)) if steps[i] < step])
    num = min(len(after), len(first), LOOKED_AT)
    if num < MIN_STEPS or not isinstance(given, (int, float)) or math.isclose(first[0], given, rel_tol=0.01):
        return None
    kept = math.isclose(after[0], given, rel_tol=1e-6)  # a new scheduler lets the loaded rate stand for one step
    alike = all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(after[kept:num], first[kept:num], strict=True))
    return (after[kept], num) if alike and len({f"{r:.6g}" for r in after[kept:num]}) >= MIN_RATES else None


def _rates(rows: Sequence[tuple[int, float]]) -> list[float]:
    """Those of the optimizer that steps first."""
    return [rate for opt, rate in rows if opt == rows[0][0]]


def _scheduler_goes_on(recording: Recording, load: Event) -> bool:
    """A scheduler that steps before and after the load, or one that was given its state: what it does now it does on purpose."""
    stepped = recording.of("scheduler")
    before, after = ({e["id"] for e in stepped if (e.t_ns > load.t_ns) == later} for later in (False, True))
    restored = any(abs(number(e.step) - number(load.step)) <= 1 for e in recording.of("load_scheduler"))
    return restored or bool(before & after)


def _goes_on(rank: int, recording: Recording, load: Event) -> bool:
    """A loop counts on from a number of the checkpoint, or the samples come in a later epoch than those before: training was taken up where it
    had been left."""
    if load["counts_on"] and _numbers(recording, load).get(str(load["counts_on"]), 0) > 1:
        return True
    epochs = [(p.opened.t_ns, number((p.distributed or {}).get("epoch"))) for p in passes.of_recording(rank, recording) if p.trains]
    earlier, later = [e for t, e in epochs if t < load.t_ns], [e for t, e in epochs if t > load.t_ns]
    if not earlier or not later or later[0] <= 0:
        return False
    return later[0] >= max(earlier) or any(later[0] in (v, v + 1) for v in _numbers(recording, load).values())


def _numbers(recording: Recording, load: Event) -> dict[str, int]:
    """Whole numbers of the checkpoint."""
    held = [e for e in recording.of("load") if e["done"] and e.t_ns <= load.t_ns and isinstance(e["numbers"], Mapping)]
    return {str(k): v for k, v in held[-1]["numbers"].items() if isinstance(v, int)} if held else {}


def _stored(recording: Recording, load: Event) -> list[str]:
    """Numbers of the checkpoint that say how far it had come."""
    found = [f"`{k}` {v}" for k, v in _numbers(recording, load).items() if 1 < v <= number(load.step)]
    return [f"the checkpoint holds {', '.join(found[:4])}"] if found else []
