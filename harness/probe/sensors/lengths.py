"""How long a learning-rate schedule was made, and whether the script had asked a loader for its length by then. Writes no event itself."""

from __future__ import annotations

import sys
from typing import Any

from .. import sites
from ..patching import wrap
from ..state import S

asked = [0]  # how often the script's own code took len() of a DataLoader


def of_scheduler(scheduler: Any) -> list[int]:
    """The lengths that a schedule was made with: torch's own attribute, or the whole numbers that a function it calls has bound."""
    stated: list[Any] = [getattr(scheduler, name, None) for name in ("total_steps", "T_max", "total_iters")]
    named: list[int] = [v for v in stated if _whole(v)]
    if named:
        return named
    parts, milestones = getattr(scheduler, "_schedulers", None), getattr(scheduler, "_milestones", None)
    if parts and milestones:
        return [milestones[-1] + n for n in of_scheduler(parts[-1])]
    return [n for function in getattr(scheduler, "lr_lambdas", None) or () for n in _bound(function)]


def _bound(function: Any) -> list[int]:
    inner = getattr(function, "func", function)
    found = [*(getattr(function, "keywords", None) or {}).values(), *(getattr(function, "args", None) or ())]
    found += getattr(inner, "__defaults__", None) or ()
    for cell in getattr(inner, "__closure__", None) or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not set yet
            continue
    return [v for v in found if _whole(v)]


def _whole(value: Any) -> bool:
    return type(value) is int and value > 1


def _len(original: Any) -> Any:
    def __len__(self: Any) -> int:
        if not S.busy and sites.is_user_code(sys._getframe(1).f_code):
            asked[0] += 1
        return int(original(self))

    return __len__


def arm() -> None:
    from torch.utils.data import DataLoader

    wrap(DataLoader, "__len__", _len)
