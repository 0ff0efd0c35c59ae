"""OPT119 gradients-cleared-before-step: gradients are zeroed between the backward and the step

What it does
    Looks for steps whose gradients are None or zero although the backward before them gave some.

Why it is bad
    The step has nothing to apply: the model never changes, without a word.

Wrong
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()

Right
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

Known limits
    Judged on the first six steps.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class ClearedBeforeStep(Check):
    code = "OPT119"
    name = "gradients-cleared-before-step"
    severity = Severity.ERROR
    explains = ("OPT113", "OPT101")

    def end(self, run: Run) -> Iterable[Finding]:
        seen = [(rank, e) for rank, e in run.events("gradients") if e["local"]]
        if not seen:
            raise NotApplicable("no gradients were seen between a backward and a step")
        lost = [
            (r, e) for r, e in seen if any(any(v) for v in e["local"].values()) and not any(any(v) for v in (e["at_step"] or {}).values())
        ]
        if len(lost) == len(seen) and len(lost) >= 2:
            rank, first = lost[0]
            event = optimizers.params_event(run, rank, first["opt"])
            yield self.finding(
                f"every gradient is gone at the step: it was zeroed after the backward, in {len(lost)} of {len(seen)} steps seen",
                where=optimizers.step_site(run, rank, first["opt"]) or (event.where if event else None),
                ranks=replicas.rank_list([r for r, _ in lost]),
                help="zero the gradients before the backward, not between backward and step",
            )
