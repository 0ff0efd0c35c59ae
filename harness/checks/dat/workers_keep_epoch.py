"""DAT108 workers-keep-epoch: persistent workers hold the copy of the dataset that they were started with.

What it does
    For loaders with persistent workers whose dataset keeps an epoch (or seed) that the script changes between passes: compares the
    content of the passes. Of any other plain attribute (a number, a text, a small list) of the dataset, of what it holds, or of the object that
    collates: whether the script changed it after the workers were started, and the code that runs in them reads it.

Why it is bad
    Workers are processes. What the parent sets on the dataset after they were started never reaches them: every epoch has the order, or the
    augmentation, of the first.

Wrong
    loader = DataLoader(dataset, num_workers=2, persistent_workers=True)
    for epoch in range(epochs):
        dataset.epoch = epoch

Right
    self.epoch = torch.zeros((), dtype=torch.long).share_memory_()      # in the dataset: memory that the workers see
    # or persistent_workers=False

Known limits
    Follows the code from `__getitem__`, `__iter__`, `__call__` to what it calls on self; an attribute that this code itself assigns, or reads only in a
    message, is left out, and so is a list or dict that it hands on to a call. An object that is replaced
    (another transform) is not seen, nor a change that lasts for a part of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity
from harness.record import Run, number, where_of

MIN_SAMPLES = 4


class WorkersKeepEpoch(Check):
    code = "DAT108"
    name = "workers-keep-epoch"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        dated = [p for p in passes.training(run) if number(p.opened["num_workers"]) > 0 and p.opened["epochs"]]
        old = [p for p in passes.training(run) if _copies(p)]
        if old:
            yield self._read_in_copy(run, old)
            return
        if not dated:
            raise NotApplicable("no training pass with workers over a dataset that keeps an epoch")
        lasting = [p for p in dated if p.opened["persistent"]]
        if not lasting:
            return  # workers that are made anew for each pass know the epoch
        groups = [g for g in passes.by_key(lasting) if len({repr(p.opened["epochs"]) for p in g}) > 1]
        groups = [g for g in groups if all(len(p.rows) >= MIN_SAMPLES for p in g)]
        if not groups:
            raise Inconclusive("needs two passes between which the script changed the dataset's epoch")
        stale = [g for g in groups if all(_same_content(g[0], p) for p in g[1:])]
        if stale:
            first = stale[0]
            values = [next(iter(p.opened["epochs"].items())) for p in (first[0], first[-1])]
            yield self.finding(
                f"{values[0][0]} went from {values[0][1]} to {values[-1][1]}, yet the workers yield what they did at first",
                where=where_of(first[0].opened["made_lasting"]) or first[0].made,
                ranks=sorted({g[0].rank for g in stale}),
                notes=[f"content of {len(first)} passes is equal, {len(first[0].rows)} samples each; the workers are persistent"],
                help="drop `persistent_workers=True`, or keep the epoch in a tensor in shared memory",
            )


    def _read_in_copy(self, run: Run, old: list[Pass]) -> Finding:
        """The passes over what is read, whichever way the code goes, in a copy that the script has changed since."""
        last = old[-1]
        told = _copies(last)[0]
        read = where_of(told.get("read"))
        before = [p for p in passes.training(run) if p.rank == last.rank and p.key == last.key and not _copies(p)]
        same = bool(before) and _same_content(before[0], last)
        return self.finding(
            f"{told.get('name')} went from {told.get('then')} to {told.get('now')} after the workers were started: they go on with {told.get('then')}",
            where=where_of(last.opened["made_lasting"]) or last.made,
            ranks=sorted({p.rank for p in old}),
            severity=Severity.ERROR if same else Severity.WARNING,
            notes=[
                "the workers are persistent: each holds the copy of the dataset that it was started with",
                *([f"read there in line {read.line}: {read.text}"] if read is not None else []),
                *(["the samples of the passes before and after the change are equal"] if same else []),
            ],
            help="drop `persistent_workers=True`, or keep the value in shared memory (a tensor after `share_memory_()`, an `mp.Value`)",
        )


def _copies(one: Pass) -> list[Mapping[str, Any]]:
    told = one.opened["copies"]
    return [t for t in told if isinstance(t, Mapping) and t.get("firm")] if isinstance(told, list) else []


def _same_content(first: Pass, other: Pass) -> bool:
    if first.iterable:
        num = min(len(first.rows), len(other.rows))
        return num >= MIN_SAMPLES and first.rows[:num] == other.rows[:num]
    known = dict(zip(first.indices, first.rows, strict=False))
    pairs = [(known[i], r) for i, r in zip(other.indices, other.rows, strict=False) if i in known]
    return len(pairs) >= MIN_SAMPLES and all(a == b for a, b in pairs)
