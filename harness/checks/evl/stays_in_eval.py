"""EVL105 stays-in-eval: after an evaluation the model is never put back into train mode.

What it does
    Finds optimizer steps while the model was in eval mode, after steps in train mode, on all ranks, to the end of the run; for
    models with Dropout or BatchNorm. So too where layers of a model in train mode are in eval mode because another module that holds them was
    evaluated.

Why it is bad
    Dropout is off and BatchNorm normalises with frozen statistics from the first evaluation on. The run looks healthy and overfits.

Wrong
    for epoch in range(epochs):
        train_one_epoch(model); evaluate(model)          # evaluate() calls model.eval()

Right
    for epoch in range(epochs):
        model.train()
        train_one_epoch(model); evaluate(model)

Known limits
    A model that is trained in eval mode from the start, or whose layers are frozen one by one, is taken as meant. An `eval()` after which nothing
    is measured before training goes on (statistics that are frozen for the last epochs) is advice, and so is one through a container of a part of
    the model, which may be frozen so on purpose. One rank alone in eval mode is SYN120.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes
from harness.checks.evl import evaluations, layers
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number

MIN_STEPS = 2


class StaysInEval(Check):
    code = "EVL105"
    name = "stays-in-eval"
    severity = Severity.ERROR
    explains = ("SYN120",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not run.present or not layers.sensitive(run):
            raise NotApplicable("no model with Dropout or BatchNorm is trained")
        if not any(True for _ in run.events("step_mode")):
            raise NotApplicable("no step was taken")
        if (found := self._through_another(run)) is not None:
            yield found
            return
        for opt in sorted({number(e["opt"]) for _, e in run.events("step_mode")}):
            starts = [_last_switch(r, opt) for r in run.present]
            if any(s is None for s in starts):
                continue
            first, last = max(s for s in starts if s is not None), min(r.num_steps for r in run.present) - 1
            if last - first + 1 < MIN_STEPS:
                raise Inconclusive("the run ended right after a switch to eval mode")
            yield self._found(run, first, last)
            return

    def _found(self, run: Run, first: int, last: int) -> Finding:
        switch = _switch(run, first)
        frozen = switch is not None and _measures_nothing(run, *switch)
        at = switch[1].where if switch is not None else None
        return self.finding(
            f"steps {first} to {last} were trained in eval mode: "
            + ("eval() was called right before them" if frozen else "nothing called train() after the evaluation"),
            where=_trained_at(run, first) or at,
            ranks=run.rank_ids,
            notes=[f"{last - first + 1} of {last + 1} steps; {layers.told(run)}", *([f"eval() was called at line {at.line}"] if at is not None else [])],
            help="call `model.train()` at the start of every training epoch",
            severity=Severity.ADVICE if frozen else None,
        )

    def _through_another(self, run: Run) -> Finding | None:
        """On all ranks: one rank alone is another mistake."""
        told = [r.of("shared_eval")[:1] for r in run.present]
        if not all(told):
            return None
        event = told[0][0]
        names = [str(n) for n in event["layers"] or ()]
        return self.finding(
            f"{len(names)} layers of the model are trained in eval mode: eval() was called on another {event['module']} that holds the same layers",
            where=event.where,
            ranks=run.rank_ids,
            notes=[f"since that evaluation, while the model itself is in train mode: {', '.join(names[:4])}"],
            severity=None if event["whole"] else Severity.ADVICE,
            help="evaluate the model itself and call `model.train()` behind it, or a copy with layers of its own: `copy.deepcopy(model).eval()`",
        )


def _trained_at(run: Run, step: int) -> Where | None:
    """The loop that trains from this step on; None where a generator goes over the loader, which has no part in it."""
    where = next((p.where for p in passes.training(run) if p.opened.step >= step), None)
    return None if where is not None and where.text.startswith("yield from") else where


def _last_switch(recording: Recording, opt: int) -> int | None:
    """The step from which an optimizer's model is in eval mode to the end, after it has been in train mode."""
    modes = [e for e in recording.of("step_mode") if number(e["opt"]) == opt]
    if not modes or modes[-1]["training"] or not any(e["training"] for e in modes):
        return None
    return modes[-1].step


def _switch(run: Run, step: int) -> tuple[int, Event] | None:
    """(rank, the eval() that was never taken back) of the first rank that told it."""
    for rank, recording in enumerate(run.ranks):
        switched = [e for e in recording.of("mode") if not e["training"] and 0 < e.step <= step] if recording is not None else []
        if switched:
            return rank, switched[-1]
    return None


def _measures_nothing(run: Run, rank: int, switch: Event) -> bool:
    """No evaluation of the rank ends between this eval() and the step that follows, though it has some elsewhere; and it is no way of leaving one:
    a context manager that restores the mode it has just set calls eval() behind its evaluation, with no train() between."""
    told = evaluations.by_rank(run)[rank]
    here = [e.ended_ns for e in told if e.step == switch.step]
    recording = run.ranks[rank]
    trained = [e.t_ns for e in (recording.of("mode") if recording is not None else []) if e["training"] and e.t_ns < switch.t_ns]
    return bool(told) and all(ended < switch.t_ns and any(t > ended for t in trained) for ended in here)
