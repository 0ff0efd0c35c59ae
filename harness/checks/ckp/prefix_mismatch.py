"""CKP103 prefix-mismatch: the names in a state dict differ from the model's by a wrapper's prefix, so nothing is loaded.

What it does
    Compares the keys given to `load_state_dict` with the model's. A finding where the missing keys and the given ones are the same but
    for a leading `module.` (DDP, DataParallel), `_orig_mod.` (torch.compile) or another common prefix: silent under `strict=False`, an
    exception otherwise. Also where a filter (`if k in own`) has dropped every name of the file for its prefix, and the model is given its own
    tensors back, or none.

Why it is bad
    Under `strict=False` not one tensor is loaded and nobody says so: training goes on from random weights.

Wrong
    model.load_state_dict(ddp_state, strict=False)

    own = model.state_dict()
    own.update({k: v for k, v in ddp_state.items() if k in own})     # none is
    model.load_state_dict(own)

Right
    torch.save(ddp.module.state_dict(), path)      # save without the wrapper
    model.load_state_dict(torch.load(path))        # load before wrapping, strictly

Known limits
    An attempt that the script corrects before it trains (strip the prefix and load again) is silent. Keys that were filtered by hand are
    compared with the names in the file that was loaded last.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import keys
from harness.model import Finding, Severity
from harness.record import Run


class PrefixMismatch(Check):
    code = "CKP103"
    name = "prefix-mismatch"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU122", "HNG*", "CKP104")

    def end(self, run: Run) -> Iterable[Finding]:
        loads = keys.final_loads(run)
        if not loads:
            raise NotApplicable("no model's state is loaded")
        told: set[tuple[str, int]] = set()
        for load in loads:
            found = self._prefixes(load)
            where = load.event.where
            place = (where.file, where.line) if where else ("", 0)
            if found is None or place in told:
                continue
            told.add(place)
            ranks = sorted({o.rank for o in loads if o.event.where == where and self._prefixes(o)})
            yield self._finding(load, found, ranks)

    def _prefixes(self, load: keys.StateLoad) -> tuple[str, str] | None:
        """(wanted, given) where a prefix alone keeps most of the model from being loaded."""
        if (found := keys.dropped(load)) is not None:
            return found
        idle = load.untouched
        if not idle or load.event["filled"] or (load.error and not load.fatal()) or 2 * len(idle) < load.total:
            return None
        if load.strict and not load.error and len(idle) == len(load.missing):
            return None
        given = load.unexpected or [name for name in load.file_names if name not in idle]
        return keys.wrapper_between(idle, given)

    def _finding(self, load: keys.StateLoad, found: tuple[str, str], ranks: list[int]) -> Finding:
        wanted, has = found
        loaded = load.total - len(load.untouched) if not load.error else 0
        given = load.unexpected or load.file_names
        wants = f"the model's keys begin with `{wanted}`" if wanted else "the model's keys have no prefix"
        holds = f"those of the state dict with `{has}`" if has else "those of the state dict have none"
        surplus = has or wanted
        return self.finding(
            f"{loaded} of {load.total} tensors are loaded: {wants}, {holds}",
            where=load.event.where,
            ranks=ranks,
            notes=[
                f"wanted {keys.shown(load.untouched, 2)}; given {keys.shown(given, 2)}",
                "strict=False hides it"
                if not load.strict
                else "load_state_dict failed"
                if load.error
                else "no key matches: a filter has dropped them all, and the module was given its own tensors back",
            ],
            help="load into the model that has no wrapper, and save `ddp.module.state_dict()`; "
            f"or take the prefix off: `key.removeprefix({surplus!r})`",
            evidence={"missing": len(load.missing), "unexpected": len(load.unexpected), "total": load.total},
        )
