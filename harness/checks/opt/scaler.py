"""OPT109 scaler-diverges: ranks scale their losses by different factors

What it does
    Compares the GradScaler's scale at each step. Where the scales have not parted yet: looks whether the gradients that unscale_() looked through
    were each rank's own, and were averaged before the step. That is a warning: the first inf on one rank alone parts them.

Why it is bad
    The averaged gradient mixes scales: it is divided by a factor that fits none of the ranks.

Wrong
    scaler = GradScaler(init_scale=2.0 ** (10 + rank))

    scaler.unscale_(optimizer)            # looks for inf in this rank's gradients
    average_gradients(model)              # and now they hold the other ranks' as well

Right
    scaler = GradScaler()                 # the same on every rank; overflow is found after the all-reduce, alike

    average_gradients(model)
    scaler.unscale_(optimizer)

Known limits
    Needs a GradScaler. Before an overflow the order is told in three of the first 8 steps, of gradients on which ranks differ, and not where the script
    asks for inf or nan in its gradients by itself (of its loss is not enough), or gives the scaler a scale
    (`update(scale)`, `load_state_dict` in the loop).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity, Where
from harness.record import Event, Run

MIN_STEPS, MAX_STEP = 3, 8  # the probe looks at the first ones
AVERAGE_FIRST = "average the gradients first, then `scaler.unscale_(optimizer)`: all ranks then find the same"


class ScalerDiverges(Check):
    code = "OPT109"
    name = "scaler-diverges"
    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "OPT103", "SYN122")

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run)
        used = False
        for step in run.steps():
            scales = step.number("scale")
            used = used or any(scales)
            if step.complete and len(set(scales)) > 1:
                yield self._parted(facts, step.index, scales)
                return
        if not used:
            raise NotApplicable("no GradScaler is used")
        where = _looked_through_alone(run)
        if where is not None:
            yield self._will_part(run, where)

    def _parted(self, facts: replicas.Replicas, step: int, scales: list[float]) -> Finding:
        run = facts.run
        made = {e["scale"] for _, e in run.events("scaler_made")}
        early = _unscaled_before_sync(run) if len(made) == 1 and not facts.wrapped else None
        note = "the gradients are unscaled, and looked through for inf and nan, before they are averaged: one rank finds some, others do not"
        return self.finding(
            f"ranks scale the loss by different factors at step {step}: {', '.join(f'{s:g}' for s in scales)}",
            where=early or replicas.first_where(run, "scaler_made" if len(made) > 1 else "scaler") or facts.grad_site(0),
            ranks=replicas.majority_out(scales) or run.rank_ids,
            notes=[note] if early else [],
            help=AVERAGE_FIRST if early else "construct GradScaler alike on every rank and update it after the gradients were averaged",
        )

    def _will_part(self, run: Run, where: Where) -> Finding:
        return self.finding(
            "each rank looks for inf in gradients of its own, which are averaged only after that: one that overflows alone skips its step, the others "
            "step on its inf, and the scales part",
            where=where,
            ranks=run.rank_ids,
            notes=["the gradients differ by rank when they are unscaled, and are equal at the step, step after step"],
            help=AVERAGE_FIRST,
            severity=Severity.WARNING,
        )


def _looked_through_alone(run: Run) -> Where | None:
    """Where ranks unscale gradients on which they differ, and that are the same on all of them at the step: no overflow has come so far."""
    told = [_only(r.of("unscaled_grads")) for r in run.present]
    if len(told) < 2 or any(e["given"] for _, e in run.events("scaler")):
        return None
    apart = [s for s in run.steps() if s.index < MAX_STEP and s.complete and all(s.index in t for t in told)]
    apart = [s for s in apart if s.same("grad") and s.taken("grad") and len({t[s.index]["grad"] for t in told}) > 1]
    known = set(told[0]).intersection(*told[1:])
    return told[0][apart[0].index].where if len(apart) >= MIN_STEPS and len(apart) > len(known) / 2 else None


def _only(events: Sequence[Event]) -> dict[int, Event]:
    """By step, where one came there: two optimizers may be unscaled before the first of them steps."""
    num = Counter(e.step for e in events)
    return {e.step: e for e in events if num[e.step] == 1}


def _unscaled_before_sync(run: Run) -> Where | None:
    """The statement that unscales, where at most steps no collective had come since the last one, and one or more came before the next."""
    first = run.present[0]
    events = list({e.step: e for e in reversed(first.of("unscaled")) if e.step >= 1}.values())  # after a skipped step more come at the same one
    early = [
        e for e in events if not e["collectives"] and not e["reduced"] and (i := first.step_index.get(e.step)) is not None and first.row(i).num_coll
    ]  # fmt: skip
    return early[-1].where if len(early) >= 2 and 2 * len(early) > len(events) else None
