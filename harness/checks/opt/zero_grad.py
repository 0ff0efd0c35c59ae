"""OPT102 missing-zero-grad: gradients are never zeroed between optimizer steps

What it does
    At every backward and zero_grad, notes whether the optimizer's gradients are zero or None; a step without such a moment since
    the last one has gradients of earlier steps in it.

Why it is bad
    Gradients pile up: every step is the sum of all before it. The loss rises, or explodes.

Wrong
    loss.backward()
    optimizer.step()

Right
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

Known limits
    Gradients on a device are judged by zero_grad() calls and None only. One step without zeroing is not judged.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.probe.protocol import FLAG_ZEROED
from harness.record import Run


class MissingZeroGrad(Check):
    code = "OPT102"
    name = "missing-zero-grad"
    severity = Severity.ERROR
    explains = ("OPT113", "OPT112", "OPT108")

    def end(self, run: Run) -> Iterable[Finding]:
        rows = optimizers.by_opt(run)
        if not rows:
            raise NotApplicable("no optimizer step was recorded")
        for (rank, opt), places in sorted(rows.items()):
            recording = run.ranks[rank]
            flags = recording.column("flags") if recording is not None else []
            if recording is None or all(f & FLAG_ZEROED for f in set(flags)):
                continue
            since, grad = optimizers.backwards_so_far(recording), protocol.DIGEST_SLICE["grad"]
            later = [
                i for before, i in pairwise(places) if since[i] > since[before] and any(recording.raw(i)[grad])
            ]  # grad 0: a closure computes it inside the step
            dirty = [i for i in later if not flags[i] & FLAG_ZEROED]
            if len(dirty) >= 3 and len(dirty) >= 0.9 * len(later):
                event = optimizers.params_event(run, rank, opt)
                yield self.finding(
                    f"{len(dirty)} of {len(later)} optimizer steps were taken on gradients that also hold those of earlier steps",
                    where=optimizers.step_site(run, rank, opt) or (event.where if event else None),
                    ranks=optimizers.ranks_of(rows, opt),
                    notes=[f"first at step {recording.column('step')[dirty[0]]}"],
                    help="call optimizer.zero_grad() before the backward of each step",
                )
                return
