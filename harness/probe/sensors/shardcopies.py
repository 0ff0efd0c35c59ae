"""Parameters that ranks hold copies of, in a model of which they hold shares of other parameters (tensor parallelism by DTensor).

Event "shard_copies" (at the first and the ninth step of an optimizer with DTensors): opt, teams: [[ranks of a mesh], whole], meshes over which a parameter
is sharded, 4 at most (whole: not by FSDP, so that plain parameters beside are copies), copies: [[parameter, ranks of its mesh (none: a plain one), position
in it, samples of this rank's part]], 6 at most, those on the fewest ranks first.
"""

from __future__ import annotations

from typing import Any

from .. import digests, fullyshard, names
from ..patching import contained
from ..state import S
from . import steps

LOOKS, END = (0, 8), 64
MAX_COPIES, MAX_TEAMS, NUM_VALUES = 6, 4, 12
_steps: dict[int, int] = {}  # optimizer -> its steps so far; -1: it holds no DTensor


@contained
def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    num = _steps.get(witness.opt, 0)
    if num == 0 and not any(_is_dtensor(p) for p in params):
        num = -1
    _steps[witness.opt] = num + 1 if num >= 0 else -1
    if num in LOOKS:
        _tell(witness, params)


def _is_dtensor(param: Any) -> bool:
    return type(param).__name__ == "DTensor" or type(getattr(param, "data", param)).__name__ == "DTensor"


def _tell(witness: Any, params: list[Any]) -> None:
    living = [(name, p) for name, p in zip(witness.names, params, strict=True) if p is not None]
    managed = {id(shard) for ref in witness.roots if (root := ref()) is not None for _, shard, _ in fullyshard.parameters(root, names.modules_of(root))}
    teams = {
        (tuple(_ranks(p)), id(p) not in managed) for _, p in living
        if _is_dtensor(p) and sum(one.is_shard() for one in p.placements) > (id(p) in managed)
    }  # fmt: skip
    if not teams:
        return
    found = [(name, _ranks(p), p) for name, p in living if p.numel() and digests.plain(digests.local(p.data))]
    found.sort(key=lambda f: len(f[1]))
    S.recorder.event(
        "shard_copies", opt=witness.opt, teams=[[list(ranks), whole] for ranks, whole in sorted(teams)[:MAX_TEAMS]],
        copies=[[name, ranks, _position(p), _values(p)] for name, ranks, p in found[:MAX_COPIES]],
    )  # fmt: skip


def _ranks(param: Any) -> list[int]:
    return [int(r) for r in param.device_mesh.mesh.flatten().tolist()] if _is_dtensor(param) else []


def _position(param: Any) -> list[int]:
    return [int(c) for c in param.device_mesh.get_coordinate() or ()] if _is_dtensor(param) else []


def _values(param: Any) -> list[float]:
    return [float(v) for v in digests.sampled(digests.local(param.data), NUM_VALUES).tolist()]


def arm() -> None:
    steps.at_step.append(_at_step, END)
