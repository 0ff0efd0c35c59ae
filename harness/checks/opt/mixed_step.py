"""OPT126 gradients-of-another-phase: a step also uses what the backward of another phase left in the gradients

What it does
    Follows, for each optimizer, which backwards have added to its gradients since these were zero. It is a finding where, in (nearly) every
    step, a backward whose own optimizer was stepped right after it has left gradients in all that this step trains, and the step's
    own backward came later and served this optimizer alone.

Why it is bad
    The generator's loss is part of the discriminator's step (or the actor's of the critic's), with the wrong sign: the two fight each
    other in one gradient, and nothing fails.

Wrong
    d_loss.backward(); opt_d.step(); opt_d.zero_grad()
    g_loss.backward(); opt_g.step(); opt_g.zero_grad()     # goes through D as well

Right
    opt_d.zero_grad(); d_loss.backward(); opt_d.step()
    opt_g.zero_grad(); g_loss.backward(); opt_g.step()

Known limits
    Judged on the first 24 steps. Several backwards before any step, optimizers that step together, an auxiliary loss that reaches a part of
    the parameters, and accumulation from one line are healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number, where_of

MIN_STEPS, MOST, LOOKED_AT = 3, 0.7, 24


class MixedStep(Check):
    code = "OPT126"
    name = "gradients-of-another-phase"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(len(optimizers.rows_of(p)) > 1 for p in run.processes):
            raise NotApplicable("no process steps two optimizers")
        hits = [(process, opt, found) for process in run.processes for opt, found in _mixed(process).items()]
        if not hits:
            return
        process, opt, found = hits[0]
        params = optimizers.params_of(process, number(opt))
        last, foreign = found[0]["parts"][-1], _foreign(found[0]["parts"])
        at = where_of(foreign[0]["site"])
        yield self.finding(
            f"{len(found)} steps use gradients of two phases: {_line(foreign[0])} left some in them, then another optimizer was stepped, then "
            f"{_line(last)} added its own",
            where=found[0].where or at or (params.where if params else None),
            ranks=replicas.rank_list([max(p.rank, p.env_rank, 0) for p, o, _ in hits if o == opt]),
            notes=[f"{at.text} (line {at.line}) reaches them too"] if at else [],
            help="zero these gradients right before the backward that belongs to them, not right after their step",
        )


def _mixed(process: Recording) -> dict[object, list[Event]]:
    """Optimizer -> its mixed steps, where (nearly) all of its first ones are."""
    table: dict[object, list[Event]] = {}
    alone = _alone(process)
    for event in process.of("mixed_step"):
        if event.step in alone and _foreign(event["parts"]):
            table.setdefault(event["opt"], []).append(event)
    steps = process.column("step")
    found = {}
    for opt, events in table.items():
        taken = sum(steps[i] < LOOKED_AT for i in optimizers.rows_of(process).get(number(opt), ()))
        if len(events) >= MIN_STEPS and len(events) >= MOST * taken:
            found[opt] = events
    return found


def _foreign(parts: object) -> list[Mapping[str, object]]:
    """Backwards of another place than the last one's, which their own optimizers were stepped after, and which reach all that it reaches."""
    if not isinstance(parts, list) or len(parts) < 2 or not all(isinstance(p, Mapping) for p in parts) or parts[-1].get("stepped"):
        return []
    own = _place(parts[-1])
    earlier = [p for p in parts[:-1] if p.get("stepped")]
    return earlier if earlier and all(_place(p) != own and p.get("num") == parts[-1].get("num") for p in earlier) else []


def _place(part: Mapping[str, object]) -> tuple[Where | None, Where | None]:
    return where_of(part.get("site")), where_of(part.get("caller"))


def _line(part: Mapping[str, object]) -> str:
    at, caller = _place(part)
    return f"line {at.line}" + (f" (from {caller.line})" if caller else "") if at else "a backward"


def _alone(process: Recording) -> set[int]:
    """Steps after which no other optimizer was stepped before the next backward."""
    steps, opts, backwards = process.column("step"), process.column("opt"), process.column("num_backward")
    return {
        steps[i]
        for i in range(len(steps))
        if not (i + 1 < len(steps) and backwards[i + 1] == 0 and opts[i + 1] != opts[i]) and steps[i] < LOOKED_AT
    }
