"""EVL105 stays-in-eval: after an evaluation the model is never put back into train mode.

What it does
    Finds optimizer steps while the model was in eval mode, after steps in train mode, on all ranks, to the end of the run; for
    models with Dropout or BatchNorm.

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
    A model that is trained in eval mode from the start, or whose layers are frozen one by one, is taken as meant. One rank alone in eval
    mode is SYN120.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import number
from harness.checks.evl import layers
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run

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
        for opt in sorted({number(e["opt"]) for _, e in run.events("step_mode")}):
            starts = [_last_switch(r, opt) for r in run.present]
            if any(s is None for s in starts):
                continue
            first, last = max(s for s in starts if s is not None), min(r.num_steps for r in run.present) - 1
            if last - first + 1 < MIN_STEPS:
                raise Inconclusive("the run ended right after a switch to eval mode")
            yield self.finding(
                f"steps {first} to {last} were trained in eval mode: nothing called train() after the evaluation",
                where=_trained_at(run, first) or _switched_at(run, first),
                ranks=run.rank_ids,
                notes=[f"{last - first + 1} of {last + 1} steps; {layers.told(run)}", *_switch_note(_switched_at(run, first))],
                help="call `model.train()` at the start of every training epoch",
            )
            return


def _trained_at(run: Run, step: int) -> Where | None:
    """The loop that trains from this step on."""
    return next((p.where for p in passes.training(run) if p.opened.step >= step), None)


def _switch_note(where: Where | None) -> list[str]:
    return [f"eval() was called at line {where.line}"] if where is not None else []


def _last_switch(recording: Recording, opt: int) -> int | None:
    """The step from which an optimizer's model is in eval mode to the end, after it has been in train mode."""
    modes = [e for e in recording.of("step_mode") if number(e["opt"]) == opt]
    if not modes or modes[-1]["training"] or not any(e["training"] for e in modes):
        return None
    return modes[-1].step


def _switched_at(run: Run, step: int) -> Where | None:
    """The eval() that was never taken back."""
    for recording in run.present:
        switched = [e for e in recording.of("mode") if not e["training"] and 0 < e.step <= step]
        if switched:
            return switched[-1].where
    return None
