"""OPT121 gradient-never-changes: the optimizer steps along one and the same gradient for ever

What it does
    Compares the gradient digests of consecutive steps of one optimizer. Bit-equal, non-zero gradients over 16 steps and more, while the
    loss changes from step to step, are an error.

Why it is bad
    New gradients are computed and never reach the optimizer: it walks on in the direction of the first one.

Wrong
    for local, shared in zip(local_model.parameters(), shared_model.parameters()):
        if shared.grad is not None:
            return                          # set once: the next zero_grad() of the local model makes new tensors
        shared.grad = local.grad

Right
    for local, shared in zip(local_model.parameters(), shared_model.parameters()):
        shared.grad = local.grad

Known limits
    Judged on steps whose digests are recorded. A loss that is linear in its parameters has such gradients too; its loss changes as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from harness import columns
from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Recording, Run

MIN_STEPS = 16


class GradientNeverChanges(Check):
    code = "OPT121"
    name = "gradient-never-changes"
    severity = Severity.ERROR
    explains = ("OPT113", "OPT102", "SHM105")

    def end(self, run: Run) -> Iterable[Finding]:
        trained = [r for r in run.processes if r.num_rows]
        if not trained:
            raise NotApplicable("no process took an optimizer step")
        hits = [(r, hit) for r in trained if (hit := _longest(r)) is not None]
        if not hits:
            return
        recording, (opt, first, num) = max(hits, key=lambda h: h[1][2])
        told = [e for e in recording.of(protocol.PARAMS) if e["opt"] == opt]
        backward = next((e.where for e in recording.of("accumulation") if e["opt"] == opt and e.where), None)
        yield self.finding(
            f"{num} steps from step {first} on were taken with one and the same gradient, although the loss changes",
            where=backward or (told[-1].where if told else None),
            ranks=sorted({max(r.rank, r.env_rank, 0) for r, _ in hits}),
            help="hand the optimizer the gradients of every backward: assign or copy them each time, not only where there are none",
        )


def _longest(recording: Recording) -> tuple[int, int, int] | None:
    """(optimizer, first step, number) of the longest run of equal gradients under losses that change."""
    best: tuple[int, int, int] | None = None
    lower = memoryview(columns.digest(recording.rows, "grad")[0]).cast("I")
    if not _repeats(lower, recording.column("opt")):  # the common case, without cutting out a row
        return None
    rows = [r for r in recording.all_rows() if r.opt != protocol.OPT_BY_HAND and r.grad and not r.flags & protocol.FLAG_ALL_NONE]
    for (opt, _), group in groupby(sorted(rows, key=lambda r: (r.opt, r.step)), key=lambda r: (r.opt, r.grad)):
        same = list(group)
        changing = len({r.loss for r in same}) >= 0.8 * len(same)
        if len(same) >= MIN_STEPS and changing and _nonzero(recording, opt) and (best is None or len(same) > best[2]):
            best = (opt, same[0].step, len(same))
    return best


def _repeats(grads: Sequence[int], opts: Sequence[int]) -> bool:
    """Whether some optimizer has MIN_STEPS equal digests in a row; steps without one (0) are passed over."""
    last: dict[int, int] = {}
    length: dict[int, int] = {}
    for grad, opt in zip(grads, opts, strict=True):
        if not grad:
            continue
        length[opt] = length[opt] + 1 if last.get(opt) == grad else 1
        last[opt] = grad
        if length[opt] >= MIN_STEPS:
            return True
    return False


def _nonzero(recording: Recording, opt: int) -> bool:
    """Whether a sampled gradient of this optimizer is known not to be zero."""
    return any(any(v) for e in recording.of("gradients") if e["opt"] == opt for v in (e["at_step"] or {}).values())
