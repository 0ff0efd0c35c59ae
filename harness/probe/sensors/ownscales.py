"""Whether what the first wrapped model is fed has, after some forwards, the mean 0 and the deviation 1 in its columns, to the last digits: so come out
the rows of a share that were scaled by that share's own mean and deviation. Asked only where the source scales by those (standardising.py).

Event "own_scale" (once, after 256 training forwards or at the end): site (the statement that makes the mean), applied (the one that scales), after
(numbers of forwards after which it is so), rows (up to the first), columns (that are so), of, thirds (sums of cubes, a column: what the share is known
by), scales [{name, mean, std}] (the constants in this rank, where they can be read).
"""

from __future__ import annotations

import ast
import math
import sys
from types import FrameType
from typing import Any

from .. import closures, cuts, sites, standardising, syntax, valuesources, variables
from ..arm import at_close
from ..patching import contained, quiet
from ..standardising import Scaling
from ..state import S
from . import thrown

NUM, MAX_COLUMNS, MAX_NUMEL = 256, 512, 65_536
MEAN_TOLERANCE, SPREAD_TOLERANCE = 2e-4, 5e-3
MAX_FRAMES, MAX_NUMBERS = 8, 512
_found: list[Scaling] = []
_scales: list[dict[str, Any]] = []
_rows: list[int] = []
_sums: list[Any] = []  # of the rows so far, of their squares and cubes; one a forward
_over = [False]


@contained
def note(tensors: list[Any]) -> None:
    """The inputs of a training forward; about 20 us where the source scales by a share's own constants, else 0.2."""
    if _over[0]:
        return
    table = _table(tensors)
    if table is None or not (_found or _begin()):
        _over[0] = True
        return
    import torch

    with torch.no_grad():
        square = table * table
        now = torch.stack([table.sum(0), square.sum(0), (square * table).sum(0)])
        if _sums and _sums[-1].shape != now.shape:
            _over[0] = True
            return
        _sums.append(_sums[-1] + now if _sums else now)
    _rows.append(int(table.shape[0]) + (_rows[-1] if _rows else 0))
    if len(_rows) >= NUM:
        _tell()


def _table(tensors: list[Any]) -> Any:
    """The first input of floating point, as rows of columns."""
    import torch

    first = next((t for t in tensors if t.is_floating_point() and t.dim() in (2, 3)), None)
    if first is None or first.requires_grad or first.shape[-1] > MAX_COLUMNS or first.numel() > MAX_NUMEL:
        return None
    if first.device.type not in ("cpu", "cuda") or (first.is_cuda and thrown.capturing()):
        return None
    return first.detach().reshape(-1, first.shape[-1]).to(torch.float64)


def _begin() -> bool:
    """Reads the source, once, and the constants, while the frames that hold them are there."""
    import torch.distributed as dist

    files = cuts.user_files()
    if not dist.is_initialized() or dist.get_world_size() < 2 or len(files) > cuts.MAX_FILES:
        return False
    trees = tuple((file, tree) for file in files if (tree := syntax.tree(file)) is not None)
    _found.extend(standardising.of_own_cuts(trees))
    if _found:
        frames = _frames()
        held = [(frame, frame.f_locals) for frame in frames]
        try:
            _scales.extend(s for scaling in _found for s in _read(scaling, held))
        finally:
            for frame, variables_of in held:
                variables.let_go(frame, variables_of)
    return bool(_found)


def _frames() -> list[FrameType]:
    found: list[FrameType] = []
    frame = sites.user_frame(sys._getframe(3))
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(frame)
        frame = sites.user_frame(frame.f_back)
    return found


def _read(scaling: Scaling, held: list[tuple[FrameType, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Mean and deviation of each thing that holds them; empty where none is in reach."""
    mean, std = standardising.leaf(scaling.mean), standardising.leaf(scaling.std)
    if mean is None or std is None:
        return []
    found = []
    for one, other in zip(_values(mean, scaling, held), _values(std, scaling, held), strict=False):
        means, stds = _numbers(one), _numbers(other)
        if means and stds and len(means) == len(stds):
            found.append({"name": ast.unparse(mean), "mean": means, "std": stds})
    return found


def _values(name: ast.expr, scaling: Scaling, held: list[tuple[FrameType, dict[str, Any]]]) -> list[Any]:
    """What a name or attribute stands for; of `self.name`, in each instance that the frames lead to."""
    if isinstance(name, ast.Name):
        scope = scaling.applied[2]
        local = [table[name.id] for f, table in held if f.f_code.co_name == (scope or "<module>") and name.id in table]
        return local[:1] or [vars(m)[name.id] for m in cuts.user_modules() if getattr(m, "__file__", None) == scaling.applied[0] and name.id in vars(m)][:1]
    if not isinstance(name, ast.Attribute) or not isinstance(name.value, ast.Name):
        return []
    if name.value.id != "self":
        return [v for thing in _values(name.value, scaling, held) for v in _attribute(thing, name.attr)]
    owner = valuesources.owner_of(scaling.tree, scaling.applied[1])
    if owner is None:
        return []
    import torch

    things = closures.reach([v for _, table in held for v in table.values()], torch.Tensor)
    return [v for thing in things if type(thing).__name__ == owner.name for v in _attribute(thing, name.attr)]


def _attribute(thing: Any, name: str) -> list[Any]:
    own = getattr(thing, "__dict__", {})
    tables = (own, own.get("_buffers") or {})
    return [table[name] for table in tables if name in table][:1]


def _numbers(value: Any) -> list[float]:
    """Empty for anything but finite numbers."""
    if hasattr(value, "numel") and callable(value.numel):
        value = value.detach().double().flatten().tolist() if value.numel() <= MAX_NUMBERS else []
    elif hasattr(value, "tolist") and getattr(value, "size", 0) <= MAX_NUMBERS:
        value = value.ravel().tolist() if hasattr(value, "ravel") else value.tolist()
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    good = all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in numbers)
    return [float(v) for v in numbers] if good else []


def _tell() -> None:
    """Once."""
    if _over[0] or not _sums:
        return
    _over[0] = True
    import torch

    table = torch.stack(_sums).cpu()
    rows = torch.tensor(_rows, dtype=torch.float64)[:, None]
    means = table[:, 0] / rows
    spread = table[:, 1] / rows - means**2
    unbiased = spread * rows / (rows - 1).clamp(min=1)
    unit = ((spread - 1).abs() < SPREAD_TOLERANCE) | ((unbiased - 1).abs() < SPREAD_TOLERANCE)
    good = ((means.abs() < MEAN_TOLERANCE) & unit).sum(1)
    filled = int((table[-1, 1] > 0).sum())
    after = [i for i, num in enumerate(good.tolist()) if num and num >= 0.5 * filled]
    if not after:
        return
    first = after[0]
    scaling = _found[0]
    S.recorder.event(
        "own_scale", scaling.made, applied=sites.as_json(scaling.applied), after=[i + 1 for i in after[:16]], rows=_rows[first],
        columns=int(good[first]), of=int(table.shape[2]), thirds=table[first, 2, :32].tolist(), scales=_scales[:8],
    )  # fmt: skip


def arm() -> None:
    at_close.append(quiet(_tell))
