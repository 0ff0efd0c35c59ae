"""Objects that weigh more at every call, and those that only look so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from builder import event, findings, recording, row, run

from harness.checks.prf.objects_grow import ObjectsGrow
from harness.model import Severity

KIB = 2**10


def told(size: Callable[[int], int], *, num: int = 64, ms_a_call: float = 10.0, ms_a_step: float = 20.0, ranks: int = 2, held: list[int] | None = None) -> list[Severity]:
    """A series of calls of `size(call)` bytes, each rank alike."""
    series = [[n, size(n), n * ms_a_call / 1e3, n * ms_a_step / 1e3] for n in range(num)]
    made = [recording([event("payloads", line=30, op="all_gather_object", series=series, held=held)], [row(0)], rank=r) for r in range(ranks)]
    return [f.severity for f in findings(ObjectsGrow, run(made))]


@pytest.mark.parametrize(("size", "fields", "severity"), [
    (lambda n: 4 * KIB * n, {}, Severity.WARNING),
    (lambda n: 4 * KIB * n, {"ms_a_call": 0.5}, None),  # a fortieth of the time, and small
    (lambda n: 64 * KIB * n, {"ms_a_call": 0.5}, Severity.ADVICE),
    (lambda n: 500 * n, {}, None),  # 31 KiB at the end
    (lambda n: 4 * KIB * min(n, 30), {}, None),  # a window that is full
    (lambda n: 4 * KIB * (n % 16), {}, None),  # emptied now and then
    (lambda n: 400 * KIB + 4 * KIB * n, {}, None),  # large from the start
    (lambda n: 4 * KIB * n, {"num": 12}, None),
    (lambda n: 4 * KIB * n, {"held": [60, 63]}, Severity.WARNING),
    (lambda n: 4 * KIB * n, {"held": [2, 63]}, None),  # new each time, and longer: a curriculum
    (lambda n: 4 * KIB * n, {"held": [0, 0]}, Severity.WARNING),  # not known
])  # fmt: skip
def test_what_is_only_added_to(size: Callable[[int], int], fields: dict[str, Any], severity: Severity | None) -> None:
    assert told(size, **fields) == ([severity] if severity else [])
