"""Whether replicas differ by no more than rounding: a script that moves weights and moves them back leaves each rank its own last bits.

SAM in the form that adds a perturbation of the rank's own gradient and subtracts it again is the usual one. What somebody wrote into the
weights differs by more, or in no sampled element at all.
"""

from __future__ import annotations

from harness.checks.base import Inconclusive
from harness.checks.syn.replicas import Parting
from harness.record import Event, Run

FEW_BITS = 2e-6  # of the largest sampled weight of a tensor: 16 units in the last place of a float32


def require_more(run: Run, parting: Parting) -> None:
    """Inconclusive where the gradients agree and every weight that differs does so in its last bits."""
    if parting.num_grad:
        return
    tables = [{e.step: e for e in r.of("gradients") if e["opt"] == parting.opt and e["weights"]} for r in run.present]
    common = set(tables[0]).intersection(*tables[1:]) if tables else set()
    told = [d for step in common for d in _differences([t[step] for t in tables])]
    if told and max(told) <= FEW_BITS:
        raise Inconclusive("the ranks' weights differ in their last bits only, as after moving them and moving them back (SAM)")


def _differences(events: list[Event]) -> list[float]:
    """Of each sampled tensor that differs between ranks: the largest difference, in parts of its largest element."""
    found = []
    for key in events[0]["weights"]:
        columns = [e["weights"].get(key) for e in events]
        if any(not isinstance(c, list) or len(c) != len(columns[0]) for c in columns):
            continue
        apart = max((max(values) - min(values) for values in zip(*columns, strict=True)), default=0.0)
        largest = max((abs(v) for c in columns for v in c), default=0.0)
        if apart > 0:
            found.append(apart / largest)
    return found
