"""OPT129 clipped-after-step: the gradients are clipped when the step has been taken

What it does
    Looks for clips behind an optimizer's step, without a backward in between, whose gradients are zeroed before the next one. In nine of
    ten clips, and three at least, that is a warning.

Why it is bad
    The clip limits gradients that nobody uses any more: the steps are taken with what the loss gave, and the script looks as if it were
    protected.

Wrong
    loss.backward(); optimizer.step(); clip_grad_norm_(model.parameters(), 1.0)

Right
    loss.backward(); clip_grad_norm_(model.parameters(), 1.0); optimizer.step()

Known limits
    The first 200 clips. A clip that only reads the norm (max_norm=inf) is not meant. With several optimizers a clip behind another one's
    step is right and silent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.probe.protocol import FLAG_ZEROED
from harness.record import Event, Recording, Run

MIN_CLIPS, MOST = 3, 0.9
BETWEEN = "clip between backward() and step(); with a GradScaler behind scaler.unscale_(optimizer)"
IN_HOOKS = (
    "the steps are taken inside backward(), by hooks: clip there, in front of the hook's step() (`clip_grad_norm_([p], max_norm)`, each parameter by itself), "
    "or clip all together and step behind backward()"
)


class ClippedAfterStep(Check):
    code = "OPT129"
    name = "clipped-after-step"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        clips = [(rank, r, _limiting(r)) for rank, r in enumerate(run.ranks) if r is not None and _limiting(r)]
        if not clips:
            raise NotApplicable("no gradient clipping")
        hit = []
        for rank, recording, own in clips:
            judged = [e for e in own if e.step < recording.num_rows]
            late = _too_late(recording, judged)
            if len(late) >= max(MIN_CLIPS, MOST * len(judged)):
                hit.append((rank, late, judged))
        if hit:
            rank, late, judged = hit[0]
            yield self.finding(
                "the gradients are clipped after the step that used them, and zeroed before the next one: the clip has no effect",
                where=late[-1].where,
                ranks=[r for r, _, _ in hit],
                notes=[f"{len(late)} of the {len(judged)} clips of rank {rank} that were looked at came behind the step, no backward in between"],
                help=IN_HOOKS if all(e["stepped_inside"] for e in late) else BETWEEN,
            )


def _limiting(recording: Recording) -> list[Event]:
    return [e for e in recording.of("clip") if isinstance(e["backwards"], int) and not (e["max_norm"] and math.isinf(e["max_norm"])) and e.step > 0]


def _too_late(recording: Recording, clips: list[Event]) -> list[Event]:
    """No backward since the last step, one before the next, and the gradients zeroed in between."""
    rows = {step: (num, flags) for step, num, flags in zip(*(recording.column(c) for c in ("step", "num_backward", "flags")), strict=True)}
    found = []
    for clip in clips:
        num, flags = rows.get(clip.step, (0, 0))
        if clip["backwards"] == 0 and num > 0 and int(flags) & FLAG_ZEROED:
            found.append(clip)
    return found
