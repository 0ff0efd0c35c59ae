"""OPT115 nondeterministic: the same run twice gives two results.

What it does
    Compares the recording with a second one of the same script, seed and number of ranks, bit by bit: losses and parameters of
    each step. A warning.

Why it is bad
    A result that cannot be repeated cannot be debugged, and a change that helps cannot be told from luck.

Wrong
    model = Net()                       # before any seed
    np.random.shuffle(order)            # never seeded

Right
    torch.manual_seed(seed); np.random.seed(seed); random.seed(seed)
    torch.use_deterministic_algorithms(True)

Known limits
    Applies only where a second recording with as many ranks exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.opt import losses
from harness.model import Finding, Severity
from harness.record import Run


class Nondeterministic(Check):
    code = "OPT115"
    name = "nondeterministic"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        other = run.reference
        if other is None or other.world_size != run.world_size:
            raise NotApplicable("no second recording with as many ranks")
        compared = 0
        for mine, theirs in zip(run.steps(), other.steps(), strict=False):
            if mine.index != theirs.index or not mine.complete or not theirs.complete:
                continue
            compared += 1
            apart = [
                name for name in ("indices", "batch", "draws", "grad", "param") if _digests(mine.rows, name) != _digests(theirs.rows, name)
            ]
            if apart:
                what = {"indices": "other samples", "batch": "other batches", "draws": "other random values"}.get(
                    apart[0], "other gradients or parameters"
                )
                recording = run.present[0]
                yield self.finding(
                    f"two runs with one seed part at step {mine.index}: {what}",
                    where=losses.site(recording, mine.index),
                    ranks=[
                        r
                        for r, (a, b) in enumerate(zip(mine.rows, theirs.rows, strict=True))
                        if getattr(a, apart[0]) != getattr(b, apart[0])
                    ],
                    notes=[f"differing: {', '.join(apart)}"],
                    help="seed torch, numpy and random before the model is made, and each loader worker; use "
                    "torch.use_deterministic_algorithms(True)",
                )
                return
        if not compared:
            raise Inconclusive("the two runs have no step in common")


def _digests(rows: Sequence[object], name: str) -> list[object]:
    return [getattr(row, name) for row in rows]
