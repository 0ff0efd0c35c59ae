"""SYN117 of shards: factors by which the ranks multiply the parts of one gradient."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run

from harness.checks.base import Check
from harness.checks.registry import all_checks
from harness.record import Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}
FLOAT32, BFLOAT16 = 1.2e-7, 7.8e-3


def sharded(*factors: tuple[float, ...], steps: int = 5, unit: Any = FLOAT32, meshes: tuple[list[int], ...] = ()) -> Run:
    """Factors of parameters `a`, `b`, ... on each rank, the same at every step."""
    made = []
    for rank, own in enumerate(factors):
        mesh = meshes[rank] if meshes else list(range(len(factors)))
        scales = [[name, factor, unit, mesh] for name, factor in zip("abcd", own, strict=False)]
        told = {"opt": 0, "names": list("abcd"), "numels": [4] * 4, "sharded": True}
        events = [event("params", line=22, **told), *(event("shard_scale", line=84, s=s, opt=0, scales=scales) for s in range(1, 1 + steps))]
        made.append(recording(events, [row(s) for s in range(8)], rank=rank, world_size=len(factors)))
    return run(made)


@pytest.mark.parametrize("told", [
    {"factors": ((0.9, 0.9), (0.6, 0.6))},  # by the norm of all of a rank's shards
    {"factors": ((1.0, 0.8, 1.0), (0.5, 1.0, 0.7))},  # layer by layer
    {"factors": ((0.9,), (0.6,))},
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "unit": BFLOAT16},
    {"factors": ((0.9, 0.9), (0.9, 0.9), (0.6, 0.6), (0.9, 0.9)), "meshes": ([0, 2], [1, 3], [0, 2], [1, 3])},
])  # fmt: skip
def test_parts_of_one_gradient_are_scaled_apart(told: dict[str, Any]) -> None:
    (found,) = findings(CHECKS["SYN117"], sharded(*told.pop("factors"), **told))
    assert "a factor of its own" in found.message and found.where is not None and found.where.line == 84 and "on rank" in found.notes[0]


@pytest.mark.parametrize("told", [
    {"factors": ((0.9, 0.7), (0.9, 0.7))},
    {"factors": ((0.9, 0.9), (0.90001, 0.9))},  # last bits of a norm that is summed in another order
    {"factors": ((0.9, 0.9), (0.93, 0.93)), "unit": BFLOAT16},
    {"factors": ((0.9, 0.9), (0.6, 0.9))},  # one parameter of several
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "steps": 1},
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "unit": None},  # a recording that somebody edited
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "meshes": ([0], [1])},  # two tensors
    {"factors": ((0.9, 0.9), (0.6, 0.6), (0.9, 0.9), (0.6, 0.6)), "meshes": ([0, 2], [1, 3], [0, 2], [1, 3])},
    {"factors": ((0.9, 0.9), ())},  # nothing of it lies on rank 1
])  # fmt: skip
def test_factors_that_are_alike_or_of_other_tensors(told: dict[str, Any]) -> None:
    assert findings(CHECKS["SYN117"], sharded(*told.pop("factors"), **told)) == []
