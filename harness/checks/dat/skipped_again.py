"""DAT117 skipped-in-every-epoch: what a resume skips is skipped in the epochs after it as well

What it does
    Looks for passes behind the load of a checkpoint whose first batches are drawn and thrown away, as many in each, before a backward is
    taken for every other one.

Why it is bad
    Skipping what the interrupted epoch had seen is right once. In every later epoch these samples are drawn, paid for and never trained on.

Wrong
    for step, batch in enumerate(loader):
        if step < resume_step: continue                          # in each epoch

Right
        if epoch == first_epoch and step < resume_step: continue

Known limits
    Only batches that go through a torch DataLoader; a sampler that starts late in every epoch is not seen. Batches that go through the
    model without gradients first, to calibrate it, are not counted as thrown away.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.model import Finding, Severity
from harness.record import Recording, Run


class SkippedAgain(Check):
    code = "DAT117"
    name = "skipped-in-every-epoch"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        loaded = {rank: min(e.t_ns for e in r.of("load")) for rank, r in enumerate(run.ranks) if r is not None and r.of("load")}
        if not loaded:
            raise NotApplicable("no checkpoint is loaded")
        resumed = [p for p in passes.all_passes(run) if p.trains and p.complete and p.opened.t_ns > loaded.get(p.rank, p.opened.t_ns)]
        if len(resumed) < 2:
            raise NotApplicable("fewer than two whole training passes after a load")
        by_loader: dict[tuple[int, int], list[passes.Pass]] = {}
        for one in resumed:
            by_loader.setdefault((one.rank, one.loader), []).append(one)
        again = {key: own for key, own in by_loader.items() if len(own) > 1 and all(_thrown(run.ranks[key[0]], p) for p in own)}
        for own in again.values():
            skipped = {one.first_trained - 1 for one in own}
            if len(skipped) == 1:
                yield self.finding(
                    f"the first {skipped.pop()} of {own[0].num_batches} batches are drawn and thrown away in each of {len(own)} epochs after the resume",
                    where=own[0].where,
                    ranks=sorted({rank for rank, _ in again}),
                    notes=["the epoch that was interrupted had seen them; the later ones have not"],
                    help="skip them in the resumed epoch only: `if epoch == first_epoch and step < resume_step`",
                )
                return


def _thrown(recording: Recording | None, one: passes.Pass) -> bool:
    """Batches before the first backward, one backward for each after it, and no forward of the first ones."""
    if recording is None or one.first_trained < 2 or one.backwards != one.num_batches - one.first_trained + 1:
        return False
    forwards = dict(zip(recording.column("step"), recording.column("num_forward"), strict=True))
    first = (one.closed.step if one.closed is not None else 0) - one.steps
    return bool(forwards) and forwards.get(first, 0) <= statistics.median(forwards.values())
