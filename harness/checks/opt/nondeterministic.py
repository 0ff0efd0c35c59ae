"""OPT115 nondeterministic: the same run twice gives two results.

What it does
    Compares the recording with a second one of the same script, seed and number of ranks, bit by bit: losses and parameters of
    each step. In one recording: looks for a numpy generator that was made without a seed and drawn from in training, in a script that
    seeds everything else: a warning where it asks for deterministic algorithms, else advice.

Why it is bad
    A result that cannot be repeated cannot be debugged, and a change that helps cannot be told from luck.

Wrong
    model = Net()                       # before any seed
    np.random.shuffle(order)            # never seeded

Right
    torch.manual_seed(seed); np.random.seed(seed); random.seed(seed)
    torch.use_deterministic_algorithms(True)

Known limits
    Without a second recording only `np.random.default_rng()` is seen, and not what loader workers draw from their copy of it.
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
        made = self._unseeded(run)
        if made is not None:
            yield made
            return
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

    def _unseeded(self, run: Run) -> Finding | None:
        """A script that seeds torch and another generator, and draws in training from one that it made without a seed."""
        seeded = {str(e["what"]) for _, e in run.events("seed") if isinstance(e["value"], int)}
        hits = [(rank, e) for rank, e in run.events("unseeded") if e["moved"]]
        if not hits or "torch" not in seeded or len(seeded) < 2:
            return None
        meant = bool(hits[0][1]["deterministic"])
        return self.finding(
            "a generator without a seed is drawn from in training: two runs with one seed differ",
            where=hits[0][1].where,
            ranks=sorted({r for r, _ in hits}),
            notes=[f"the script seeds {', '.join(sorted(seeded))}" + (" and asks for deterministic algorithms" if meant else "")],
            help="give it a seed of its own on each rank: `np.random.default_rng([seed, rank])`",
            severity=self.severity if meant else Severity.ADVICE,
        )


def _digests(rows: Sequence[object], name: str) -> list[object]:
    return [getattr(row, name) for row in rows]
