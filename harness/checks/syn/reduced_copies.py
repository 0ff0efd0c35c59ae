"""Whether the statement that reduces gradients was given something of the size of those that it does not reach: a copy, dropped afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from harness.model import Where
from harness.probe import protocol
from harness.record import Run


def dropped(run: Run, where: Where | None, names: Sequence[str]) -> bool:
    """At this statement tensors that are no gradients were reduced, at a step at which others were, with the size of each of these parameters."""
    told = [e for e in run.present[0].of("coll") if where is not None and e.where == where]
    steps = {e.step for e in told if e["grad"]}
    copies = {e["numel"] for e in told if not e["grad"] and not e["inside"] and e.step in steps}
    sizes = {n: s for e in run.present[0].of(protocol.PARAMS) for n, s in zip(e["names"] or (), e["numels"] or (), strict=False)}
    return bool(names) and all(sizes.get(n) in copies for n in names)


NOTE = "the statement does reduce tensors of their size, but copies: `.contiguous()` (of a channels_last gradient), `.to()`, `.float()` make one"
HELP = "write what was reduced back: `p.grad.copy_(reduced)`"
