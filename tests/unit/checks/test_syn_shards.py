"""SYN117 of shards: factors by which the ranks multiply the parts of one gradient."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run

from harness.checks.base import Check
from harness.checks.registry import all_checks
from harness.model import Severity
from harness.record import Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}
FLOAT32, BFLOAT16 = 1.2e-7, 7.8e-3


def sharded(*factors: tuple[float, ...], steps: int = 5, unit: Any = FLOAT32, meshes: tuple[list[int], ...] = (), grow: float = 0.1) -> Run:
    """Factors of parameters `a`, `b`, ... on each rank at the first step; those below 1 shrink with the steps, in another proportion."""
    made = []
    for rank, own in enumerate(factors):
        mesh = meshes[rank] if meshes else list(range(len(factors)))
        scales = {s: [[name, factor ** (1 + grow * s), unit, mesh] for name, factor in zip("abcd", own, strict=False)] for s in range(1, 1 + steps)}
        told = {"opt": 0, "names": list("abcd"), "numels": [4] * 4, "sharded": True}
        events = [event("params", line=22, **told), *(event("shard_scale", line=84, s=s, opt=0, scales=scales[s]) for s in range(1, 1 + steps))]
        made.append(recording(events, [row(s) for s in range(8)], rank=rank, world_size=len(factors)))
    return run(made)


@pytest.mark.parametrize("told", [
    {"factors": ((0.9, 0.9), (0.6, 0.6))},  # by the norm of all of a rank's shards
    {"factors": ((1.0, 1.0), (0.6, 0.6))},  # one rank's norm is below the limit
    {"factors": ((0.9, 0.9, 0.9), (0.6, 0.6))},  # something lies on one rank alone
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "unit": BFLOAT16, "grow": 0.3},
    {"factors": ((0.9, 0.9), (0.9, 0.9), (0.6, 0.6), (0.9, 0.9)), "meshes": ([0, 2], [1, 3], [0, 2], [1, 3])},
])  # fmt: skip
def test_parts_of_one_gradient_are_scaled_apart(told: dict[str, Any]) -> None:
    (found,) = findings(CHECKS["SYN117"], sharded(*told.pop("factors"), **told))
    assert "parts of one gradient" in found.message and found.where is not None and found.where.line == 84 and "on rank" in found.notes[0]
    assert found.severity is Severity.ERROR


@pytest.mark.parametrize("factors", [
    ((1.0, 0.8, 1.0), (0.5, 1.0, 0.7)),  # layer by layer, or head by head
    ((25.6, 8.1), (33.3, 12.4)),  # to unit norm
    ((0.9,), (0.6,)),
    ((0.9, 0.9, 0.8), (0.6, 0.6)),
])  # fmt: skip
def test_a_factor_for_each_gradient_may_be_meant(factors: tuple[tuple[float, ...], ...]) -> None:
    (found,) = findings(CHECKS["SYN117"], sharded(*factors))
    assert found.severity is Severity.ADVICE and "another for each gradient" in found.message and "head" in found.help


@pytest.mark.parametrize("told", [
    {"factors": ((0.9, 0.7), (0.9, 0.7))},
    {"factors": ((0.9, 0.9), (0.90001, 0.9))},  # last bits of a norm that is summed in another order
    {"factors": ((0.9, 0.9), (0.93, 0.93)), "unit": BFLOAT16},
    {"factors": ((0.9, 0.9), (0.6, 0.9))},  # one parameter of several
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "steps": 1},
    {"factors": ((0.1, 0.1), (1.0, 1.0)), "grow": 0.0},  # rows that learn slower
    {"factors": ((0.1, 0.9), (1.0, 0.9)), "grow": 0.0},
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "unit": None},  # a recording that somebody edited
    {"factors": ((0.9, 0.9), (0.6, 0.6)), "meshes": ([0], [1])},  # two tensors
    {"factors": ((0.9, 0.9), (0.6, 0.6), (0.9, 0.9), (0.6, 0.6)), "meshes": ([0, 2], [1, 3], [0, 2], [1, 3])},
    {"factors": ((0.9, 0.9), ())},  # nothing of it lies on rank 1
])  # fmt: skip
def test_factors_that_are_alike_or_of_other_tensors(told: dict[str, Any]) -> None:
    assert findings(CHECKS["SYN117"], sharded(*told.pop("factors"), **told)) == []


def flat(*factors: float, grow: float = 0.1) -> Run:
    """One part of a flat vector on each rank, its factor at the first step."""
    made = []
    for rank, factor in enumerate(factors):
        scales = {s: [["the output of reduce_scatter_single", factor ** (1 + grow * s), FLOAT32, [0, 1]]] for s in range(5)}
        events = [event("shard_scale", line=55, s=s, opt=-1, scales=scales[s], flat=True) for s in range(5)]
        made.append(recording(events, [row(s) for s in range(8)], rank=rank, world_size=len(factors)))
    return run(made)


def test_parts_of_a_flat_vector_are_scaled_apart() -> None:
    (found,) = findings(CHECKS["SYN117"], flat(0.27, 0.1))
    assert found.severity is Severity.WARNING and "one flat gradient" in found.message and found.where is not None and found.where.line == 55
    assert "DTensor" not in found.help


def test_parts_of_a_flat_vector_are_scaled_alike() -> None:
    assert findings(CHECKS["SYN117"], flat(0.27, 0.27)) == []
