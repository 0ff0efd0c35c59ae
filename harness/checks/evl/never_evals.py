"""EVL106 never-evals: a model is measured in train mode.

What it does
    In passes without gradients over a loader: looks whether Dropout drew its masks, or BatchNorm updated its statistics, because the
    model was still in train mode. The model's own `train()` may be the cause, where it takes no notice of the mode that eval() hands it.

Why it is bad
    The measurement is made with neurons switched off at random, or normalises with the statistics of the batch; and BatchNorm learns from
    the test set.

Wrong
    with torch.no_grad():
        for x, y in test_loader: ...

Right
    model.eval()
    with torch.no_grad():
        for x, y in test_loader: ...
    model.train()

Known limits
    A pass right after an explicit `model.train()`, or through torch's `update_bn`, is taken as meant (recalibration, Monte Carlo
    dropout). Loops without a loader are not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.checks.evl import layers
from harness.model import Finding, Severity
from harness.record import Event, Run


class NeverEvals(Check):
    code = "EVL106"
    name = "never-evals"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        looked = [p for p in passes.all_passes(run) if p.closed is not None and not p.trains and isinstance(p.closed["switch"], Mapping)]
        looked = [p for p in looked if not (p.closed and p.closed["grad"])]
        if not looked or not layers.sensitive(run):
            raise NotApplicable("no pass without gradients over a model with Dropout or BatchNorm")
        wrong = [p for p in looked if _in_train_mode(p) and not _meant(run, p)]
        if wrong:
            first = wrong[0]
            moved = [
                what
                for key, what in (("body_random", "Dropout drew masks"), ("batchnorm_moved", "BatchNorm updated its statistics"))
                if _switch(first).get(key)
            ]
            against = _against(run, first)
            why = f"train() of {against['module']} takes no notice of its mode, and " if against is not None else ""
            yield self.finding(
                f"{why}the model is evaluated in train mode: " + " and ".join(moved),
                where=against.where if against is not None else first.where,
                ranks=sorted({p.rank for p in wrong}),
                notes=[f"{len(wrong)} of {len(looked)} passes looked at; {layers.told(run)}"],
                help="call `model.eval()` before this loop, and `model.train()` after it"
                if against is None
                else "hand the mode on: `super().train(mode)`",
            )


def _switch(one: Pass) -> Mapping[str, Any]:
    found = one.closed["switch"] if one.closed is not None else None
    return found if isinstance(found, Mapping) else {}


def _in_train_mode(one: Pass) -> bool:
    told = _switch(one)
    return bool(told.get("root_training") and ((told.get("dropout") and told.get("body_random")) or told.get("batchnorm_moved")))


def _against(run: Run, one: Pass) -> Event | None:
    """The last switch before the pass, if it was an eval() that a train() of the script's own turned into its contrary."""
    recording = run.ranks[one.rank]
    modes = [e for e in recording.of("mode") if e.t_ns < one.opened.t_ns] if recording is not None else []
    return next((e for e in reversed(modes) if e.step == one.opened.step and e["against"]), None)


def _meant(run: Run, one: Pass) -> bool:
    """An explicit train() since the last training step, or torch's own recalibration."""
    recording = run.ranks[one.rank]
    modes = [e for e in recording.of("mode") if e.t_ns < one.opened.t_ns and not e["against"]] if recording is not None else []
    where = one.where
    return bool(modes and modes[-1]["training"] and modes[-1].step == one.opened.step) or (where is not None and "update_bn" in where.text)
