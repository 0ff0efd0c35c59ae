"""OPT102 missing-zero-grad: gradients are never zeroed between optimizer steps

What it does
    At every backward and zero_grad, notes whether the optimizer's gradients are zero or None; a step without such a moment since
    the last one has gradients of earlier steps in it. Where gradients are computed on a copy of the model and given to the optimizer's
    parameters (A3C), the copy's are looked at: the optimizer's zero_grad() does not reach them.

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

from collections.abc import Iterable, Sequence
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import optimizers
from harness.checks.syn import in_hooks
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.probe.protocol import FLAG_ZEROED
from harness.record import Event, Recording, Run, where_of


class MissingZeroGrad(Check):
    code = "OPT102"
    name = "missing-zero-grad"
    severity = Severity.ERROR
    explains = ("OPT113", "OPT112", "OPT108")

    def end(self, run: Run) -> Iterable[Finding]:
        rows = [(process, opt, places) for process in run.processes for opt, places in optimizers.rows_of(process).items()]
        if not rows:
            raise NotApplicable("no optimizer step was recorded")
        lent = [(process, e) for process in run.processes for e in process.of("lent_kept")]
        if lent:
            yield self._lent(lent)
            return
        hit = [(process, opt, found) for process, opt, places in rows if (found := _piled_up(process, places))]
        if not hit or in_hooks.updates(run):  # cleared in the middle of a backward, and filled again by DDP's reducer: that is the cause
            return
        process, opt, (dirty, num_steps) = hit[0]
        params = optimizers.params_of(process, opt)
        yield self.finding(
            f"{len(dirty)} of {num_steps} optimizer steps were taken on gradients that also hold those of earlier steps",
            where=optimizers.accumulated_at(process, opt) or (params.where if params else None),
            ranks=sorted({int(p.start.get("rank") or 0) for p, o, _ in hit if o == opt}),
            notes=[f"first at step {process.column('step')[dirty[0]]}"],
            help="call optimizer.zero_grad() before the backward of each step",
        )


    def _lent(self, lent: list[tuple[Recording, Event]]) -> Finding:
        """Of a copy whose gradients the optimizer's parameters are given."""
        event = lent[0][1]
        zeroed = where_of(event["zeroed"])
        return self.finding(
            f"gradients are computed on a copy and given to the optimizer's parameters, and {event['num']} of the copy's {event['of']} are never "
            "zeroed: each step also holds those of earlier steps",
            where=zeroed or event.where,
            ranks=sorted({int(p.start.get("rank") or 0) for p, _ in lent}),
            notes=["what a step was taken with was still there when the next backward began"]
            + (["zero_grad() clears the optimizer's parameters, not the copy"] if zeroed is not None else []),
            help="zero the copy's gradients before each backward: `local_model.zero_grad()`",
        )


def _piled_up(process: Recording, places: Sequence[int]) -> tuple[list[int], int] | None:
    """Rows of steps on gradients that were never zero since the step before, and how many steps were looked at."""
    flags = process.column("flags")
    if all(f & FLAG_ZEROED for f in set(flags)):
        return None
    since, grad = optimizers.backwards_so_far(process), protocol.DIGEST_SLICE["grad"]
    parts = any(e["sharded"] for e in process.of(protocol.PARAMS))  # whose gradients have no digest
    later = [i for before, i in pairwise(places) if since[i] > since[before] and (parts or any(process.raw(i)[grad]))]  # 0: a closure's, inside the step
    dirty = [i for i in later if not flags[i] & FLAG_ZEROED]
    return (dirty, len(later)) if len(dirty) >= 3 and len(dirty) >= 0.9 * len(later) else None
