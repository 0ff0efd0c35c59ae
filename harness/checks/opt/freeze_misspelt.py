"""OPT130 freeze-has-no-effect: what was to be frozen got an attribute that torch does not read

What it does
    At the first step, looks for parameters and modules with an attribute that is False and is called nearly `requires_grad`, and for modules
    that have `requires_grad` itself, while the parameters are trained all the same.

Why it is bad
    Python accepts any attribute. The backbone that was to stay as it was is trained, at full cost, and forgets what it knew.

Wrong
    for p in model.features.parameters(): p.require_grad = False
    model.features.requires_grad = False                        # an attribute of the module

Right
    model.features.requires_grad_(False)

Known limits
    Looked at once, when the first step is taken. Freezing later in the run is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run, number, texts


class FreezeMisspelt(Check):
    code = "OPT130"
    name = "freeze-has-no-effect"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.num_rows for r in run.present):
            raise NotApplicable("no step was taken")
        told = [(rank, e) for rank, e in run.events("misspelt")]
        if not told:
            return
        event = told[0][1]
        of_module = event["of"] == "module"
        what = f"{number(event['num'])} {'module' if of_module else 'parameter'}{'s' if number(event['num']) != 1 else ''}"
        yield self.finding(
            f"`{event['attribute']} = False` freezes nothing: {what} ({replicas.listed(texts(event['names']))}), trained all the same",
            where=event.where,
            ranks=sorted({rank for rank, _ in told}),
            notes=["a module has no such switch: torch reads requires_grad of each parameter"] if of_module else ["torch reads `requires_grad`"],
            help="call `module.requires_grad_(False)`, or set `p.requires_grad = False` on each parameter",
        )
