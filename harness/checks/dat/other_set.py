"""DAT116 sampler-of-another-set: a loader is given the sampler of another, smaller data set.

What it does
    Compares the data set that a loader's sampler deals out with the loader's own. A finding where the sampler's is another object and
    smaller, and no pass over the loader's data set draws an index beyond it.

Why it is bad
    A sampler knows its set by its length only. Given to the loader of a larger set it deals out the first samples of that set, again and
    again; the rest is never learned from. Nothing fails, and the loss falls, faster even.

Wrong
    train_sampler, val_sampler = DistributedSampler(train_set), DistributedSampler(val_set)
    train_loader = DataLoader(train_set, 32, sampler=val_sampler)

    part = Subset(data, chosen)
    loader = DataLoader(data, 32, sampler=DistributedSampler(part))     # the first len(chosen) samples, not the chosen ones

Right
    train_loader = DataLoader(train_set, 32, sampler=train_sampler)
    loader = DataLoader(part, 32, sampler=DistributedSampler(part))

Known limits
    Silent where both sets are of one length (a wrapper that transforms), where the sampler was given a range or a list of numbers, or the
    first part of the loader's own set (a run on part of the data), and for samplers of the script's own. A sampler of a larger set fails with
    an IndexError instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run, number

MIN_LEFT = 0.02  # of the loader's set


class SamplerOfAnotherSet(Check):
    code = "DAT116"
    name = "sampler-of-another-set"
    severity = Severity.ERROR
    explains = ("DAT101", "DAT112", "DAT115", "EVL101")

    def end(self, run: Run) -> Iterable[Finding]:
        every = passes.few(passes.all_passes(run))
        drawn = [p for p in every if p.closed is not None and (p.trains or p.evaluates)]
        if not drawn:
            raise NotApplicable("no pass over a data loader")
        for one in drawn:
            size, num = one.dataset_len, _dealt(one)
            if not 0 < num < size * (1 - MIN_LEFT) or not one.indices:
                continue
            if any(max(p.indices, default=-1) >= num for p in every if p.opened["dataset_id"] == one.opened["dataset_id"]):
                continue
            yield self._found(run, one, num)
            return

    def _found(self, run: Run, one: Pass, num: int) -> Finding:
        what = "trains" if one.trains else "measures"
        notes = [f"the sampler was made for a {(one.opened['dealt'] or {}).get('kind')} of {num} samples, the loader's set has {one.dataset_len}"]
        unused = _unused_sampler(run, one)
        if unused:
            notes.append(unused)
        return self.finding(
            f"the loader is given the sampler of another data set: it {what} on the first {num} of its {one.dataset_len} samples only",
            where=one.made,
            ranks=sorted({p.rank for p in passes.all_passes(run) if p.key == one.key}),
            notes=notes,
            help="give the loader a sampler that was made for its own data set",
            evidence={"dealt": num, "dataset_len": one.dataset_len},
        )


def _dealt(one: Pass) -> int:
    """Length of the other set whose indices this pass draws; 0 where the sampler is the loader's own, or was limited on purpose."""
    told = one.opened["dealt"]
    if not isinstance(told, dict) or told.get("plain") or told.get("first"):
        return 0
    return number(told.get("len"))


def _unused_sampler(run: Run, one: Pass) -> str:
    """set_epoch goes to a sampler that no loader asks."""
    recording = run.ranks[one.rank]
    if recording is None:
        return ""
    asked = {(e["distributed"] or {}).get("id") for e in recording.of("loader") if isinstance(e["distributed"], dict)}
    lost = next((e for e in recording.of("set_epoch") if e["sampler"] not in asked), None)
    return f"set_epoch() at line {lost.where.line} goes to a sampler that no loader asks" if lost is not None and lost.where else ""
