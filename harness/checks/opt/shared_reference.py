"""OPT144 reference-shares-weights: the frozen reference is a shallow copy of the model that is trained, and moves with it

What it does
    Follows modules that the script makes by `copy.copy(model)`. A finding where such a copy is called without gradients on the very inputs that the
    original is trained on, before the backward and step after step, while it holds every parameter of it that an optimizer trains. A warning where the
    copy is assigned to, or called by, a name with a word for a reference (reference, teacher, anchor, old, frozen and the like), else advice.

Why it is bad
    `copy.copy` copies the module and nothing inside: children, parameters and buffers are the same objects. A reference policy or a teacher
    that is compared with the trained model is then this model itself: a ratio of 1, a penalty of 0, a preference loss that stays at log 2, and nothing
    holds the weights near to where they began. Its `eval()` puts the layers of the trained model into eval mode, too.

Wrong
    reference = copy.copy(policy).eval()

Right
    reference = copy.deepcopy(policy).eval().requires_grad_(False)

Known limits
    A copy that is called on other inputs (a rollout, an evaluation), or once for several updates, is silent. So is one that is made in another way,
    and a second name for the model itself. Whether the copy's output is compared with the model's is not seen: a second handle on the present weights, for
    weights of the samples or pseudo-labels, is healthy and gets the advice. Not seen once something is compiled, nor where the copy's output is detached
    instead of made without gradients.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks import told
from harness.checks.base import Check
from harness.model import Finding, Severity, Where
from harness.record import Run, where_of

_REFERENCE = re.compile(
    r"(?<![a-z])(refs?|references?|teachers?|anchors?|old|prev|previous|frozen|fixed|target|base|baseline|initial|init|sft|prior|snapshot|pretrained)(?![a-z])",
    re.IGNORECASE,
)
_CALLED = re.compile(r"([\w.]+)\(")


class ReferenceSharesWeights(Check):
    code = "OPT144"
    name = "reference-shares-weights"
    severity = Severity.WARNING
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        found = told.of(run, "shared_reference")
        if not found:
            return
        event = found[0][1]
        called = where_of(event["called"])
        yield self.finding(
            f"{event['module']} is copied by copy.copy, which copies nothing inside: the copy that is called without gradients, on the inputs that the "
            "original is trained on, has its weights at every step",
            where=event.where,
            ranks=sorted({rank for rank, _ in found}),
            notes=[
                f"{event['num']} parameters that an optimizer trains are the same objects in both; seen in each of {event['steps']} steps",
                *([f"the copy is called at {called.place}"] if called is not None else []),
            ],
            help="use copy.deepcopy, and requires_grad_(False) on the copy",
            severity=None if _is_meant(event.where, called) else Severity.ADVICE,
        )


def _is_meant(made: Where | None, called: Where | None) -> bool:
    """As a reference, by the name that the copy is given, or is called by."""
    names = [made.text.partition("=")[0]] if made is not None else []
    return any(_REFERENCE.search(name) for name in names + (_CALLED.findall(called.text) if called is not None else []))
