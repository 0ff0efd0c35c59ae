"""DAT104 on a mesh: ranks that hold shares of one layer are dealt different samples, and their copies of the other parameters part."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run

from harness.checks.base import Check
from harness.checks.registry import all_checks
from harness.model import Severity
from harness.record import Event, Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}
BEGUN = [1.0, 2.0]
WAYS = ([1.1, 2.1], [1.1, 1.9], [1.1, 2.1], [1.1, 1.9])
MESHES = ([0, 2], [1, 3], [0, 2], [1, 3])


def passed(rank: int, replicas: int, number: int, order: int) -> list[Event]:
    told = {"loop": 0, "loader": 0, "distributed": {"num_replicas": replicas, "rank": number}, "dataset": "Toy", "dataset_len": 64, "planned": 8}
    return [event("loader", line=70, **told), event("pass", line=70, s=8, loop=0, loader=0, num_batches=8, num_samples=64, order=order, trains=True, backwards=8)]


def meshed(
    *, ways: Any = WAYS, meshes: Any = MESHES, team: list[int] | None = None, whole: bool = False, begun: Any = None, dealt: Any = None, copies: int = 2,
    draws: Any = (),
) -> Run:
    """Four ranks, data parallel x tensor parallel (2 x 2), or what else the meshes say."""
    made = []
    for rank, way in enumerate(ways):
        position = [meshes[rank].index(rank)] if meshes[rank] else []
        start = begun[rank] if begun else BEGUN
        teams = [[team or [0, 1, 2, 3], whole]]
        seen = [
            event("shard_copies", s=s, opt=0, teams=teams, copies=[[f"norm{i}", meshes[rank], position, values] for i in range(copies)])
            for s, values in ((0, start), (8, way))
        ]
        events = [event("pg", done=True, rank=rank, world_size=len(ways)), *passed(rank, *(dealt[rank] if dealt else (len(ways), rank, 100 + rank))), *seen]
        events += [event("params", line=22, opt=0, names=["norm0"], numels=[2])]
        events += [event("draw", line=13, s=1, at=0, digest=d[rank]) for d in draws]
        made.append(recording(events, [row(s) for s in range(9)], rank=rank, world_size=len(ways)))
    return run(made)


def told(made: Run) -> list[str]:
    return [f.message for f in findings(CHECKS["DAT104"], made) if "shares of one layer" in f.message]


def test_ranks_of_a_team_that_are_dealt_other_samples() -> None:
    (found,) = [f for f in findings(CHECKS["DAT104"], meshed()) if "shares of one layer" in f.message]
    assert found.ranks == (0, 1) and "rank 1 of 4" in found.notes[0] and "`norm0`" in found.notes[1]
    assert told(meshed(meshes=([], [], [], []), whole=True))  # plain parameters beside a layer that is not FSDP's


@pytest.mark.parametrize("how", [
    {"ways": ([1.1, 2.1],) * 4},  # the same samples
    {"ways": ([1.1, 2.1], [1.1, 2.1 + 1e-4], [1.1, 2.1], [1.1, 2.1])},  # rounding
    {"begun": (BEGUN, [3.0, 2.0], BEGUN, [3.0, 2.0])},  # no copies: each begins with its own
    {"meshes": ([0, 1, 2, 3],) * 4},  # all of them are parts of one
    {"team": [0, 2]},  # two models
    {"meshes": ([], [], [], [])},  # parameters that FSDP was told to leave alone
    {"dealt": ((2, 0, 100), (2, 0, 100), (2, 1, 101), (2, 1, 101))},  # over the data-parallel dimension: another cause
    {"ways": (BEGUN,) * 4},
])  # fmt: skip
def test_copies_that_stay_together_or_are_none(how: dict[str, Any]) -> None:
    assert told(meshed(**how)) == []


@pytest.mark.parametrize(("draws", "line", "severity"), [
    (([7, 8, 7, 8],), 13, Severity.ERROR),
    (([7, 7, 7, 7],), 22, Severity.ADVICE),
    ((), 22, Severity.ADVICE),
])  # fmt: skip
def test_copies_part_where_no_sampler_deals(draws: Any, line: int, severity: Severity) -> None:
    (found,) = findings(CHECKS["SYN127"], meshed(dealt=((2, 0, 100), (2, 0, 100), (2, 1, 101), (2, 1, 101)), draws=draws))
    assert "copies of its other parameters part" in found.message and found.ranks == (0, 1) and "`norm0`" in found.notes[0]
    assert (found.where is not None and found.where.line, found.severity) == (line, severity)


def test_copies_that_stay_together_do_not_part() -> None:
    assert not [f for f in findings(CHECKS["SYN127"], meshed(ways=([1.1, 2.1],) * 4)) if "copies" in f.message]
