"""CKP118 best-forgotten: after a resume the best score so far starts over, although the checkpoint holds it.

What it does
    Follows the entries of the script's own checkpoints whose name says that they are a record (best, lowest, highest, min_val, max_acc). A finding where training
    counts on from a loaded file, and the next file's record is worse than the loaded one: a record never gets worse.

Why it is bad
    The first evaluation after the resume counts as the best of all: the best model's file is overwritten by a worse one, and early stopping
    begins to count anew.

Wrong
    self.epoch = checkpoint["epoch"]                  # checkpoint["best"] is left out

Right
    self.epoch, self.best = checkpoint["epoch"], checkpoint["best"]

Known limits
    Needs two different values of the record beside the loaded one, which tell whether low or high is good, and a first score that is worse than
    the stored one. Silent where epochs or steps do not count on: a new phase has a record of its own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files, goes_on
from harness.model import Finding, Severity
from harness.record import Event, Run

# a largest or smallest of validation; that of the batches of an epoch (`max_batch_loss`) or of gradients is no record
MEASURED = r"(?:val|dev|test|eval|score|acc|metric)"
RECORD = re.compile(rf"best|lowest|highest|record|(?:min|max)_{MEASURED}|{MEASURED}\w*_(?:min|max)$", re.IGNORECASE)


class BestForgotten(Check):
    code = "CKP118"
    name = "best-forgotten"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [load for load in files.loads(run) if load.ok and _records(load.end)]
        if not loads:
            raise NotApplicable("no checkpoint with a best score is loaded")
        for load in loads:
            recording = run.ranks[load.rank]
            found = None if recording is None or files.steps_after(recording, load.begin) == 0 else _lost(run, load)
            if found is not None and recording is not None and goes_on.counted_on(run, recording, load):
                yield self._found(run, load, *found)
                return

    def _found(self, run: Run, load: files.Load, key: str, stored: float, later: float) -> Finding:
        return self.finding(
            f"the checkpoint's `{key}` is {stored:.6g}, and the next one's is {later:.6g}: the record was not restored",
            where=load.begin.where,
            ranks=sorted({o.rank for o in files.loads(run) if o.begin.where == load.begin.where}),
            notes=["training counts on from the stored epoch or step, so it is no new phase", "a worse model may overwrite the best one's file"],
            help=f"restore it as well: `best = checkpoint[{key!r}]`",
            evidence={"stored": stored, "later": later},
        )


def _records(event: Event | None) -> dict[str, float]:
    found = event["numbers"] if event is not None else None
    return {str(k): float(v) for k, v in found.items() if RECORD.search(str(k)) and isinstance(v, (int, float))} if isinstance(found, Mapping) else {}


def _lost(run: Run, load: files.Load) -> tuple[str, float, float] | None:
    """(entry, its loaded value, its value in the next file) where that is worse."""
    saves = sorted((s.begin for s in files.saves(run) if set(s.begin["groups"] or ()) == set(load.groups)), key=lambda e: e.t_ns)
    until = min((o.begin.t_ns for o in files.loads(run) if o.rank == load.rank and o.begin.t_ns > load.begin.t_ns), default=1 << 63)
    for key, stored in _records(load.end).items():
        values = [(e.t_ns, v) for e in saves if (v := _records(e).get(key)) is not None]
        before, after = [v for t, v in values if t < load.begin.t_ns], [v for t, v in values if load.begin.t_ns < t < until]
        way = _way([*before, stored], after)
        if after and way and (after[0] - stored) * way < -1e-9 * abs(stored):
            return key, stored, after[0]
    return None


def _way(*series: Sequence[float]) -> int:
    """1: the values only rise; -1: they only fall; 0: neither, or they never change."""
    steps = [b - a for one in series for a, b in itertools.pairwise(one)]
    rises, falls = all(s >= 0 for s in steps), all(s <= 0 for s in steps)
    return int(rises) - int(falls)
