"""OPT137 loss-of-all-pairs: predictions (N, 1) and targets (N) broadcast to N x N inside of the loss

What it does
    Reads the loss's graph at the first backwards, beside the shapes that the loader gave: a difference of shape (N, N), N the rows of the batch,
    between what a linear layer of one output made, and targets without that axis. Silent where the source makes an axis anywhere near the loss.

Why it is bad
    Each prediction is measured against the targets of all other samples: the best the model can do is the mean of the batch. Nothing fails,
    and the loss falls a little and then stands.

Wrong
    error = target - model(x)                 # (N) - (N, 1) is (N, N)

Right
    error = target - model(x).squeeze(1)

Known limits
    Needs three backwards of batches that a DataLoader gave, whose other dimensions are not N. Where anything beside the loss shapes a tensor
    (`view`, `unsqueeze`, `[:, None]`, `stack`, ...) the pairs may be meant, and it is silent.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run


class LossOfAllPairs(Check):
    code = "OPT137"
    name = "loss-of-all-pairs"
    severity = Severity.ERROR
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(r.of("loss") for r in run.present):
            raise NotApplicable("no backward was seen")
        hits = [(rank, r.of("crossed")[0]) for rank, r in enumerate(run.ranks) if r is not None and r.of("crossed")]
        if not hits:
            return
        event = hits[0][1]
        rows, predicted, target = event["rows"], tuple(event["predicted"]), tuple(event["target"])
        yield self.finding(
            f"predictions of shape {predicted} and targets of shape {target} broadcast to {rows} x {rows} in the loss: each is measured against all others",
            where=event.where,
            ranks=[rank for rank, _ in hits],
            help="give both the same shape: `.squeeze(1)` on the model's output, or `.unsqueeze(1)` on the targets",
        )
