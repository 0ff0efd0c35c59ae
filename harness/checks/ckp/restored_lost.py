"""CKP117 restored-then-rebuilt: what a checkpoint was loaded into is thrown away, and a new one takes its place.

What it does
    Watches models and optimizers that are given a file's state until the second step after it. A finding where one is gone by then, nobody has
    called, read or stepped it, no living model has its values, and one of the same kind and sizes was made since and was given no state.

Why it is bad
    The resume seems to work, nothing fails. But the average of the weights (EMA), the model or Adam's moments start over.

Wrong
    self.ema = EMA(model)
    self.restore(path)                   # self.ema.load_state_dict(...)
    self.ema = EMA(model)

Right
    self.ema = EMA(model)                # everything is made first
    self.restore(path)

Known limits
    Models and optimizers of torch only: tensors that a class of the script's own keeps in a dict are not seen. Silent where the loaded object is
    still referred to from anywhere, and where the new one was made by another statement and is not trained.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.model import Finding, Severity
from harness.record import Event, Run, where_of


class RestoredThenRebuilt(Check):
    code = "CKP117"
    name = "restored-then-rebuilt"
    severity = Severity.ERROR
    explains = ("CKP107", "CKP113")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.of("load_state") or r.of("load_optimizer") for r in run.present):
            raise NotApplicable("no state is loaded")
        lost = [(rank, e) for rank, e in run.events("restored_lost")]
        told: set[str] = set()
        for _, event in lost:
            key = f"{event.where}{event['rebuilt']}"
            if key not in told:
                told.add(key)
                yield self._found(event, sorted({r for r, e in lost if e.where == event.where}))

    def _found(self, event: Event, ranks: list[int]) -> Finding:
        model = event["what"] == "module"
        what = f"the `{event['kind']}` of {event['num']} tensors" if model else f"the {event['kind']} of {event['num']} parameters"
        line = f"line {event.where.line}" if event.where is not None else "a load"
        name = files.name(str(event["source"] or "")) or "a checkpoint"
        return self.finding(
            f"{what} that {line} restored from {name} is thrown away unused: a new one is made afterwards",
            where=where_of(event["rebuilt"]) or event.where,
            ranks=ranks,
            notes=["the new one was given no state, and is trained" if event["trained"] else "the new one was given no state"],
            help="make models, averages and optimizers first, and load the checkpoint into them last",
        )
