"""CKP120 wrong-dict-saved: one state dict is saved under two names, and another one that was read out for it is saved nowhere.

What it does
    Looks at the state dicts that a rank reads out in one step and at the files that it writes in that step. A finding where the same dict goes
    into two files by two statements, and another model's dict of as many tensors, read in the same step, goes into none of the run's files, nor
    into anything else: the name that it is given is read nowhere in its function.

Why it is bad
    A line was copied and the name not changed: the file of the averaged weights (EMA) holds the raw ones. The average that was kept up for the
    whole run is lost, and nothing fails.

Wrong
    raw, ema = model.state_dict(), ema_model.state_dict()
    torch.save(raw, "model.pt")
    torch.save(raw, "model_ema.pt")

Right
    torch.save(raw, "model.pt")
    torch.save(ema, "model_ema.pt")

Known limits
    Silent where the other dict is loaded into a model, and where what is saved is a copy. The same weights under two names (last and best) are
    healthy, as is a dict that is read to be compared, hashed or shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run

MIN_TIMES = 2  # or the only time that it saves


class WrongDictSaved(Check):
    code = "CKP120"
    name = "wrong-dict-saved"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        savers = [(rank, r) for rank, r in enumerate(run.ranks) if r is not None and r.of("saved_dicts")]
        if not savers:
            raise NotApplicable("no state dict is saved")
        for rank, recording in savers:
            steps = sorted({e.step for e in recording.of("saved_dicts")})
            hit = [found for step in steps if (found := _twice(recording, step)) is not None]
            if hit and len(hit) >= min(MIN_TIMES, len(steps)):
                yield self._found(rank, *hit[0])
                return

    def _found(self, rank: int, first: Event, second: Event, unsaved: Event) -> Finding:
        line = f"line {unsaved.where.line}" if unsaved.where is not None else "a line"
        names = [files.short(str(e["path"])) for e in (first, second)]
        return self.finding(
            f"{names[0]} and {names[1]} are given the same state dict, and the one that {line} reads out (`{unsaved['module']}`) is saved nowhere",
            where=second.where,
            ranks=(rank,),
            notes=["both dicts were read in the step in which the files were written"],
            help="save the other dict in one of these files",
        )


def _twice(recording: Recording, step: int) -> tuple[Event, Event, Event] | None:
    """(first file, second file, the dict that is in none) of the saves of one step."""
    saved = [e for e in recording.of("saved_dicts") if e.step == step]
    read = {e["token"]: e for e in recording.of("state_dict") if e.step == step}
    anywhere = {t for e in recording.of("saved_dicts") for t in e["tokens"] or ()} | {e["token"] for e in recording.of("alias_used")}
    if any(e.step == step and e["kept_at"] for e in recording.of("load_state")):
        return None
    for first, second in combinations(saved, 2):
        same = set(first["tokens"] or ()) & set(second["tokens"] or ())
        if first.where == second.where or first["path"] == second["path"] or len(first["tokens"]) != 1 or len(second["tokens"]) != 1:
            continue
        told = next((read[t] for t in same if t in read), None)
        unsaved = [e for t, e in read.items() if t not in anywhere and e["unused"]]
        other = [e for e in unsaved if told is not None and e["num"] == told["num"] and e.where != told.where]
        if other:
            return first, second, other[0]
    return None
