"""Two ranks that train one small model, as recorded: healthy unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from builder import event, recording, row, run

from harness.probe import protocol
from harness.record import Event, Run

NAMES = ["0.bias", "0.weight", "1.bias", "1.weight"]


def wrap_event(**fields: Any) -> Event:
    told = {
        "index": 0, "names": NAMES, "requires_grad": [True] * 4, "find_unused": False, "static_graph": False, "broadcast_buffers": True, "buffers": [],
        "each": [1, 2, 3, 4],
    }  # fmt: skip
    return event("wrap", line=20, **(told | fields))


def setup(rank: int, *, ddp: bool = True, **params: Any) -> list[Event]:
    told = {
        "opt": 0, "kind": "SGD", "names": NAMES, "numels": [4, 16, 4, 16], "ddp": [0 if ddp else -1] * 4, "owned": [True] * 4,
        "requires_grad": [True] * 4,
    }  # fmt: skip
    events = [event("pg", done=True, rank=rank, world_size=2)]
    if ddp:
        events += [event("wrapping", line=20, names=NAMES, shapes=[[4], [4, 4], [4], [4, 4]]), wrap_event()]
    return [*events, event("params", line=22, **(told | params)), event("initial", opt=0, each=[1, 2, 3, 4])]


def details(steps: int, grads: Callable[[int, int], int], params: Callable[[int, int], int]) -> bytes:
    """Per-parameter digests: functions of (step, position)."""
    import struct

    blob = b""
    for step in range(steps):
        values = [grads(step, i) for i in range(4)] + [params(step, i) for i in range(4)]
        blob += protocol.DETAIL.pack(step, 0, 4) + struct.pack("<8I", *values)
    return blob


def two_ranks(
    *,
    steps: int = 12,
    ddp: bool = True,
    each: Callable[[int, int], Mapping[str, Any]] = lambda rank, step: {},
    extra: Callable[[int], list[Event]] = lambda rank: [],
    wrong: Mapping[str, tuple[int, ...]] | None = None,
    ungraded: tuple[int, ...] = (),
    setup_of: Callable[[int], list[Event]] | None = None,
    **ending: Any,
) -> Run:
    """`each(rank, step)` changes a row; `wrong` = {"grad": positions, "param": positions} makes those differ by rank in the details."""
    differing = wrong or {}
    recordings = []
    for rank in (0, 1):
        base = {"grad": 5, "param": 6, "full": 7, "none": 8, "train": 9, "hyper": 10, "num_reduce": int(ddp), "num_forward": 1, "num_batches": 1,
                "num_samples": 8, "flags": (protocol.FLAG_DDP if ddp else 0) | protocol.FLAG_ZEROED | protocol.FLAG_CHANGED}  # fmt: skip
        rows = [row(s, **(base | {"param": 100 + s} | dict(each(rank, s)))) for s in range(steps)]
        events = [*(setup_of(rank) if setup_of else setup(rank, ddp=ddp)), *extra(rank)]
        made = recording(events, rows, rank=rank, world_size=2)
        made.params = details(
            steps,
            lambda s, i, rank=rank: 0 if i in ungraded else 50 + s + i + 1000 * rank * (i in differing.get("grad", ())),
            lambda s, i, rank=rank: 90 + s + i + 1000 * rank * (i in differing.get("param", ())),
        )
        recordings.append(made)
    return run(recordings, **ending)


def by_rank(**fields: tuple[Any, Any]) -> Callable[[int, int], Mapping[str, Any]]:
    """Row fields that differ by rank at every step."""
    return lambda rank, step: {name: values[rank] for name, values in fields.items()}
