"""CKP104 partial-load: load_state_dict(strict=False) leaves tensors at their random start that the checkpoint has under another name.

What it does
    Looks at the keys that were missing and those that were given and not used. A finding where the two belong together: letters eaten by
    `str.lstrip`, a prefix that `str.replace` took out of the middle of names, a key that has the model's name in the file and lost it in the
    script, a layer renamed, half of a layer (its weights without its biases), an outer dict (`{"model": ..., "epoch": ...}`) that was given
    in the place of its entry, or nothing matched at all.

Why it is bad
    Part of the model stays random; the loss is a little worse and nobody knows why.

Wrong
    state = {key.lstrip("module."): value for key, value in state.items()}   # takes letters, not a prefix: "embed" becomes "bed"
    model.load_state_dict(state, strict=False)

Right
    state = {key.removeprefix("module."): value for key, value in state.items()}
    model.load_state_dict(state)

Known limits
    A new head whose keys have no likeness among the unused ones, or whose shapes differ, is a choice and silent. A whole-model prefix is
    CKP103's.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import keys
from harness.model import Finding, Severity
from harness.record import Run


class PartialLoad(Check):
    code = "CKP104"
    name = "partial-load"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU122", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        loads = keys.final_loads(run)
        if not loads:
            raise NotApplicable("no model's state is loaded")
        told: set[tuple[str, int]] = set()
        for load in loads:
            where = load.event.where
            place = (where.file, where.line) if where else ("", 0)
            if place in told or (load.error and not load.fatal()):
                continue
            finding = self._judge(load)
            if finding is not None:
                told.add(place)
                yield finding

    def _judge(self, load: keys.StateLoad) -> Finding | None:
        pairs, halves = keys.near(load), keys.halves(load) if not load.error else []
        nothing = not load.strict and load.matched == 0 and load.total > 1
        entry = keys.entry(load)
        if not (pairs or halves or nothing or entry):
            return None
        lost = [k for k, _ in pairs] or halves or load.missing
        first = f"`{pairs[0][0]}` was given as `{pairs[0][1]}`" if pairs else f"not loaded: {keys.shown(lost)}"
        cut, mid = [p for p in pairs if keys.eaten(*p)], [p for p in pairs if keys.bitten(*p)]
        own = keys.renamed(load)
        if entry:
            inside = "".join(f"[{part!r}]" for part in entry.split("/"))
            first = f"not loaded: {keys.shown(lost)}, which lie one level down in the file, in {inside}"
            help = f"load that entry, not the dict around it: `load_state_dict(checkpoint{inside})`"
        elif mid:
            help = "use `key.removeprefix(...)`: `replace` takes the text out of the middle of names too; and load with strict=True"
        elif cut:
            help = "use `key.removeprefix(...)`: `lstrip` takes a set of letters off; and load with strict=True"
        elif own:
            help = "the file has the model's own names, the script renames them: take off the wrapper's prefix only, and load with strict=True"
        elif halves and not pairs:
            help = "give every key of the layer, or rename none; load with strict=True"
        else:
            help = "rename the keys to the model's names and load with strict=True"
        return self.finding(
            f"{len(lost)} of {load.total} tensors keep their random start although the checkpoint has them",
            where=load.event.where,
            ranks=(load.rank,),
            notes=[first, f"{load.matched} keys matched, {len(load.missing)} were missing, {len(load.unexpected)} unused"],
            help=help,
            severity=None if cut or mid or own or entry or halves or nothing or load.error else Severity.WARNING,
            evidence={"matched": load.matched, "missing": len(load.missing), "unexpected": len(load.unexpected)},
        )
