"""OPT112 loss-not-finite: an optimizer step was taken with a loss that is NaN or infinite.

What it does
    Looks at the loss of every step. Steps that a GradScaler skipped do not count. An error; a warning where later losses are
    finite again, so that the parameters were not spoiled.

Why it is bad
    One NaN gradient makes every parameter NaN, on all ranks after the next all-reduce. The job goes on and costs as before.

Wrong
    loss = -torch.log(p).mean()               # p = 0
    optimizer = SGD(params, lr=10.0)

Right
    loss = F.cross_entropy(logits, target)    # log-softmax inside
    a smaller lr, clip_grad_norm_, a GradScaler for float16

Known limits
    On GPUs the loss is read when its copy has arrived, so the step may be some steps late.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.opt import losses
from harness.model import Finding, Severity
from harness.probe import protocol
from harness.record import Run
from harness.steps import Step


class LossNotFinite(Check):
    code = "OPT112"
    name = "loss-not-finite"
    severity = Severity.ERROR
    explains = ("OPT113", "OPT114", "OPT115", "OPT121", "SYN127")

    def __init__(self) -> None:
        self.seen = False
        self.bad: list[tuple[int, int, float]] = []  # step, rank, loss
        self.last_finite = -1
        self.fine: list[int] = []  # ranks whose loss was finite at the first such step

    def step(self, step: Step) -> None:
        flags, loss = step.number("flags"), step.number("loss")
        if not loss:
            return
        bad = any(f & protocol.FLAG_LOSS_NOT_FINITE for f in set(flags))
        self.seen = self.seen or bad or any(math.isfinite(v) for v in loss)
        if not bad:
            if losses.all_finite(loss):
                self.last_finite = step.index
            return
        ranks = [rank for rank, raw in enumerate(step.raw) if raw is not None]
        for rank, f, v in zip(ranks, flags, loss, strict=True):
            if f & protocol.FLAG_LOSS_NOT_FINITE and not f & protocol.FLAG_SKIPPED:
                self.fine = self.fine if self.bad else [r for r, o in zip(ranks, loss, strict=True) if math.isfinite(o)]
                self.bad.append((step.index, rank, v))

    def end(self, run: Run) -> Iterable[Finding]:
        if not self.seen:
            raise NotApplicable("no loss was seen: no backward() on a scalar before a step")
        if not self.bad:
            return
        index, rank, value = self.bad[0]
        ranks = sorted({r for _, r, _ in self.bad})
        recovered = self.last_finite > max(i for i, _, _ in self.bad)
        recording = run.ranks[rank]
        on_rank = f" on rank {rank}, finite on {'the others' if len(self.fine) > 1 else f'rank {self.fine[0]}'}," if self.fine else ""
        yield self.finding(
            f"the loss is {'nan' if math.isnan(value) else 'infinite'}{on_rank} at step {index} and the step was taken",
            where=losses.site(recording, index) if recording is not None else None,
            ranks=ranks,
            severity=Severity.WARNING if recovered else None,
            notes=[
                f"first on rank {rank} at step {index}; {len({i for i, _, _ in self.bad})} steps in all",
                *(["later losses are finite again"] if recovered else []),
            ],
            help="look for log(0), division by zero or a learning rate that is too large; skip the step on all ranks where "
            "the loss is not finite" + (": where that of any rank is not, all-reduce the flag with MAX before the decision" if self.fine else ""),
        )
