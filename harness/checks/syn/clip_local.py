"""SYN117 clip-before-sync: gradients are clipped before they are averaged

What it does
    Compares the norms that clip_grad_norm_ returned at the same step on all ranks, where the gradients at the step are equal. An error where a
    norm was above the limit, so that it was clipped; advice where none was so far.

Why it is bad
    Each rank clips by the norm of its own gradient; the mean of clipped gradients is not the clipped mean. The parameters stay
    equal, so nothing else shows it.

Wrong
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    average_gradients(model)

Right
    loss.backward()
    average_gradients(model)
    clip_grad_norm_(model.parameters(), 1.0)

Known limits
    Needs two steps whose norms differ. A call without a limit (`max_norm=inf`, to log the norm) clips nothing, and is healthy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import losses
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run


class ClipBeforeSync(Check):
    code = "SYN117"
    name = "clip-before-sync"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        replicas.require(run)
        clips = list(run.events("clip"))
        if not clips:
            raise NotApplicable("no gradient clipping")
        limit = _limit([e["max_norm"] for _, e in clips])
        if limit == math.inf:
            return  # nothing is clipped: the norms are read only
        wrong = []
        for step in run.steps():
            norms = step.number("grad_norm")
            if step.complete and step.same("grad") and losses.all_finite(norms):
                low, high = min(norms), max(norms)
                if high > low * (1 + 1e-3) + 1e-12:
                    wrong.append((step.index, low, high))
        if len(wrong) >= 2:
            clipped = [w for w in wrong if w[2] > limit]
            index, low, high = (clipped or wrong)[0]
            yield self.finding(
                "gradients are clipped by each rank's own norm before they are averaged",
                where=clips[0][1].where,
                ranks=run.rank_ids,
                notes=[f"norms at step {index}: {low:.4g} to {high:.4g}; {len(wrong)} steps, of which {len(clipped)} had a norm above the limit"],
                help="average the gradients first, then clip",
                severity=None if clipped else Severity.ADVICE,
            )


def _limit(limits: Sequence[object]) -> float:
    """The smallest norm that the script clips to; 0 where some call's is not known."""
    known = [float(v) for v in limits if isinstance(v, (int, float))]
    return min(known) if len(known) == len(limits) else 0.0
