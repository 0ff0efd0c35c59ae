"""A loss over the rows of all ranks that every rank computes, behind a gather whose backward hands on the rank's own part of the gradient."""

from __future__ import annotations

import math

from harness.checks.syn import gradients
from harness.probe import protocol
from harness.record import Event, Run, texts

MIN_STEPS, LOOKED_AT = 3, 256
ALIKE = 1e-5  # of losses that the ranks compute from the same numbers


def found(run: Run) -> Event | None:
    """Where the mean over ranks that DDP takes leaves a part of the gradient alone. None where something may make up for it."""
    told = [r.of("own_slice") for r in run.present]
    if not all(told) or len(run.present) != run.world_size or any(e["scaled"] or e["parts"] != run.world_size for events in told for e in events):
        return None
    averaged = all(r.of("wrap") for r in run.present) and not any(e["group_ranks"] for _, e in run.events("wrap"))
    hooked = any(True for _ in run.events("comm_hook"))
    return told[0][0] if averaged and not hooked and not gradients.rescaled(run) and _one_loss(run) else None


def _one_loss(run: Run) -> bool:
    """Whether the ranks' losses are one number at every step."""
    columns = [list(r.column("loss"))[:LOOKED_AT] for r in run.present]
    rows = list(zip(*columns, strict=False))
    return len(rows) >= MIN_STEPS and all(math.isfinite(v) and math.isclose(v, row[0], rel_tol=ALIKE) for row in rows for v in row)


def feels_a_factor(run: Run) -> bool:
    """Whether the optimizers step by the gradient itself: Adam and its like divide its size out."""
    kinds = {k for _, e in run.events(protocol.PARAMS) for k in texts([e["kind"]])}
    return kinds == {"SGD"}
