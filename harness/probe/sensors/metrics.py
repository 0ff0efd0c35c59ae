"""Numbers that the ranks reduce and report: small tensors before and after a reduction, scalars given to a TensorBoard writer.

Event "reduced" (first 48 of a call site, 600 in all; tensors of at most 8 elements that are no gradients): site, op, reduce ("sum" |
"avg" | "max" | ...), before, after (values), rows (samples of the last batch), at_t, at_y, at (time, synchronisations and step of the
call: device tensors are read later, 16 at a time, so that no step waits for the device).
Event "scalar" (first 400): site, tag, value; SummaryWriter.add_scalar of a number that is not on a device.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

from .. import digests, sites
from ..arm import at_close, on_import
from ..patching import after, quiet, wrap
from ..state import S
from . import backward

OPS = ("all_reduce", "reduce")
MAX_NUMEL, MAX_A_SITE, MAX_IN_ALL = 8, 48, 600
_counts: dict[sites.Site, int] = {}
_total = [0]
_late: list[tuple[sites.Site, dict[str, Any], Any, Any]] = []  # copies on their way from a device, and the event that says they arrived


def _wanted(tensor: Any, kwargs: Any, site: sites.Site) -> bool:
    if (
        not hasattr(tensor, "numel")
        or kwargs.get("async_op")
        or not 0 < tensor.numel() <= MAX_NUMEL
        or not digests.plain(tensor)
        or tensor.device.type not in ("cpu", "cuda")
    ):
        return False
    if _counts.get(site, 0) >= MAX_A_SITE or _total[0] >= MAX_IN_ALL or _is_gradient(tensor):
        return False
    _counts[site] = _counts.get(site, 0) + 1
    _total[0] += 1
    return True


def _is_gradient(tensor: Any) -> bool:
    at = tensor.data_ptr()
    return any(
        p.grad is not None and p.grad.data_ptr() == at for o in list(backward._optimizers) for g in o.param_groups for p in g["params"]
    )


def _reduction(args: Any, kwargs: Any) -> str:
    named = [
        str(a).rsplit(".", 1)[-1].lower() for a in (*args, *kwargs.values()) if type(a).__name__ in ("RedOpType", "ReduceOp", "OpType")
    ]
    return named[0] if named else "sum"


@quiet
def _before(tensor: Any, kwargs: Any, site: sites.Site) -> Any:
    """A copy of the tensor, or None where the reduction is not of interest."""
    return tensor.detach().clone() if _wanted(tensor, kwargs, site) else None


@quiet
def _after(op: str, tensor: Any, earlier: Any, args: Any, kwargs: Any, site: sites.Site) -> None:
    import torch

    fields = {
        "op": op,
        "reduce": _reduction(args, kwargs),
        "rows": S.batch_rows,
        "at_t": time.time_ns(),
        "at_y": S.recorder.syncs,
        "at": S.steps,
    }
    both = torch.stack([earlier.flatten(), tensor.detach().flatten()])
    if tensor.device.type == "cpu":
        _write(site, fields, both)
        return
    host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
    host.copy_(both, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    _late.append((site, fields, host, arrived))
    if len(_late) >= 16:
        flush()


def _write(site: sites.Site, fields: dict[str, Any], both: Any) -> None:
    S.recorder.event("reduced", site, before=both[0].tolist(), after=both[1].tolist(), **fields)


def flush() -> None:
    """Write what has arrived from the device; never waits for the rest, which may never come."""
    pending, _late[:] = list(_late), []
    for site, fields, host, arrived in pending:
        if arrived.query():
            _write(site, fields, host)
        elif len(_late) < 64:
            _late.append((site, fields, host, arrived))


def _make(op: str) -> Any:
    def make(original: Any) -> Any:
        def reducing(*args: Any, **kwargs: Any) -> Any:
            if S.busy or S.in_collective or S.recorder.disabled:
                return original(*args, **kwargs)
            tensor = args[0] if args else kwargs.get("tensor")
            site = sites.here(2)
            earlier = _before(tensor, kwargs, site)
            result = original(*args, **kwargs)
            if earlier is not None:
                _after(op, tensor, earlier, args[1:], kwargs, site)
            return result

        return reducing

    return make


def _note_scalar(result: Any, writer: Any, tag: Any = None, value: Any = None, *args: Any, **kwargs: Any) -> None:
    value = kwargs.get("scalar_value", value)
    if getattr(getattr(value, "device", None), "type", "cpu") == "cpu" and hasattr(value, "__float__"):
        S.recorder.event("scalar", sites.here(4), tag=str(kwargs.get("tag", tag))[:100], value=float(value))


def _arm_tensorboard(module: ModuleType) -> None:
    after(module.SummaryWriter, "add_scalar", _note_scalar)


def arm() -> None:
    import torch.distributed as dist

    on_import("torch.utils.tensorboard.writer", _arm_tensorboard)
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    for op in OPS:
        if wrap(c10d, op, _make(op)):
            setattr(dist, op, getattr(c10d, op))
    at_close.append(quiet(flush))
