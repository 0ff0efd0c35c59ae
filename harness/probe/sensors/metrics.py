"""Numbers that the ranks reduce and report: small tensors before and after a reduction, scalars given to a TensorBoard writer.

Event "reduced" (first 48 of a call site, 600 in all; tensors of at most 8 elements that are no gradients): site, op, reduce ("sum" |
"avg" | "max" | ...), before, after (values), rows (samples of the last batch), same (the last call reduced this tensor too), metric (at the first
call of a site, as pairs: see nonlinear.py; by_ranks: divided by the number of ranks behind it, or before it, see predivided.py; chosen: see
choices.py; own_pairs: see owncandidates.py; unread: see unreadresults.py), at_t, at_y, at (time,
synchronisations and step of the call: device tensors are read later, 16 at a time, so that no step waits for the device), way (which of the
script's calls led here, as a number that means nothing in another process).
Event "reduced_total" (the same bounds; all-reduced tensors of more elements, at most 65,536; the first 48 calls of a site): the same fields, before and
after hold the sum over the elements, low the smallest one of what went in.
Event "gathered" (the same bounds; objects of any size): site, op, values (what this rank gives, if at most 8 numbers), leaves (how many
numbers), at_t, at, way, cut (the script may cut or thin out what it gathers, see cuts.py); of whole numbers, one a sample: classes (packed
digests), joined (the statement behind it that puts the parts together); of a row of scores for each: scored (the same of the best column), joined;
at the first call of a site numbered: see shardorder.py; zipped, items (length of the list): see zippedparts.py.
Event "scalar" (first 400): site, tag, value; SummaryWriter.add_scalar of a number that is not on a device.
"""

from __future__ import annotations

import time
import weakref
from types import ModuleType
from typing import Any

from .. import (
    choices,
    cuts,
    datasets,
    digests,
    nonlinear,
    origins,
    owncandidates,
    predivided,
    protocol,
    shardorder,
    sites,
    unreadresults,
    zippedparts,
)
from ..arm import at_close, on_import
from ..patching import after, quiet, wrap
from ..state import S
from . import collectives

OPS = ("all_reduce", "reduce")
GATHERS = {
    "all_gather": 1,
    **dict.fromkeys(protocol.GATHER_INTO, 1),
    "gather": 0,
    "gather_single": 0,
    "all_gather_object": 1,
    "gather_object": 0,
}  # position of what a rank gives
MAX_NUMEL, MAX_A_SITE, MAX_IN_ALL = 8, 48, 600
MAX_CLASSED, MAX_CLASSES = 4, 4096  # gathers of a site, samples of each
MAX_COLUMNS = 256
MAX_TOTALLED = 65_536  # elements: a confusion matrix of 256 classes
_counts: dict[sites.Site, int] = {}
at_sum: list[Any] = []  # sensors that are told of a small tensor that holds the sum over the ranks now
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
    if _counts.get(site, 0) >= MAX_A_SITE or _total[0] >= MAX_IN_ALL or collectives.is_gradient(tensor):
        return False
    _counts[site] = _counts.get(site, 0) + 1
    _total[0] += 1
    return True


def _totalled(tensor: Any, kwargs: Any, site: sites.Site) -> bool:
    """Whether a larger tensor's sums are told: not a gradient's, and at most 48 times from a line, gradients counted."""
    if not hasattr(tensor, "numel") or not MAX_NUMEL < tensor.numel() <= MAX_TOTALLED or kwargs.get("async_op"):
        return False
    key = (site[0] + "+", *site[1:])
    if _counts.get(key, 0) >= MAX_A_SITE or _total[0] >= MAX_IN_ALL:
        return False
    _counts[key] = _counts.get(key, 0) + 1
    if tensor.requires_grad or not digests.plain(tensor) or tensor.device.type not in ("cpu", "cuda") or collectives.is_gradient(tensor):
        return False
    _total[0] += 1
    return True


def _sums(tensor: Any) -> Any:
    """Sum and smallest element, on the tensor's device."""
    import torch

    flat = tensor.detach()
    return torch.stack([flat.sum(dtype=torch.float64), flat.min().double()])


def _reduction(args: Any, kwargs: Any) -> str:
    named = [
        str(a).rsplit(".", 1)[-1].lower() for a in (*args, *kwargs.values()) if type(a).__name__ in ("RedOpType", "ReduceOp", "OpType")
    ]
    return named[0] if named else "sum"


@quiet
def _before(tensor: Any, kwargs: Any, site: sites.Site) -> Any:
    """A copy of the tensor, the sums of a larger one, or None where the reduction is not of interest."""
    if _totalled(tensor, kwargs, site):
        return _sums(tensor)
    return tensor.detach().clone() if _wanted(tensor, kwargs, site) else None


_given: dict[sites.Site, weakref.ref[Any]] = {}  # the tensor that a statement reduced last


def _is_same(site: sites.Site, tensor: Any) -> bool:
    """Whether the statement's last call reduced this very tensor; not its address, which a new one may have by now."""
    known = _given.get(site)
    _given[site] = weakref.ref(tensor)
    return known is not None and known() is tensor


def _way() -> int:
    return hash(tuple(sites.stack(3))) & 0x7FFFFFFF


def _is_first(site: sites.Site, tensor: Any) -> bool:
    return _counts.get(site if tensor.numel() <= MAX_NUMEL else (site[0] + "+", *site[1:])) == 1


@quiet
def _after(op: str, tensor: Any, earlier: Any, args: Any, kwargs: Any, site: sites.Site) -> None:
    import torch

    fields = {
        "op": op,
        "reduce": _reduction(args, kwargs),
        "rows": S.batch_rows,
        "same": _is_same(site, tensor),
        "at_t": time.time_ns(),
        "at_y": S.recorder.syncs,
        "at": S.steps,
        "way": _way(),
        "result": sites.as_json(origins.result_after(site) or sites.UNKNOWN) if _counts.get(site) == 1 else None,
        "metric": nonlinear.look(sites.stack(3, 4), op, 0) if _counts.get(site) == 1 else None,
        "by_ranks": _counts.get(site) == 1 and (nonlinear.divided_by_ranks(site, op) or predivided.look(site, op)),
        "chosen": choices.look(site, op, 0) if _counts.get(site) == 1 else None,
        "pairs": sites.as_json(nonlinear.look_for_pairs(sites.stack(3, 4), op, 0) or sites.UNKNOWN) if _counts.get(site) == 1 else None,
        "own_pairs": sites.as_json(owncandidates.look(site, op) or sites.UNKNOWN) if _counts.get(site) == 1 else None,
    }
    if _is_first(site, tensor):
        fields["unread"] = unreadresults.told(site, op)
    if tensor.numel() > MAX_NUMEL:
        fields["low"] = 0.0  # read with the sums
        both = torch.stack([earlier, _sums(tensor)])
    else:
        both = torch.stack([earlier.flatten(), tensor.detach().flatten()])
        if fields["reduce"] == "sum":
            for look in at_sum:
                look(tensor, site, op)
    if tensor.device.type == "cpu":
        _write(site, fields, both)
        return
    host = torch.empty(both.shape, dtype=both.dtype, device="cpu", pin_memory=True)
    host.copy_(both, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    _late.append((site, fields, host, arrived))
    if len(_late) >= 16:
        flush()


def _write(site: sites.Site, fields: dict[str, Any], both: Any) -> None:
    given, got = both.tolist()
    if "low" in fields:
        S.recorder.event("reduced_total", site, **(fields | {"before": given[:1], "after": got[:1], "low": given[1]}))
    else:
        S.recorder.event("reduced", site, before=given, after=got, **fields)


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


def _make_gather(op: str, position: int) -> Any:
    names = ("obj", "object", "input_tensor", "tensor")

    def make(original: Any) -> Any:
        def gathering(*args: Any, **kwargs: Any) -> Any:
            if not S.busy and not S.in_collective and not S.recorder.disabled:
                given = args[position] if len(args) > position else next((kwargs[n] for n in names if n in kwargs), None)
                _note_gathered(op, given, sites.here(2))
            return original(*args, **kwargs)

        return gathering

    return make


@quiet
def _note_gathered(op: str, given: Any, site: sites.Site) -> None:
    if _counts.get(site, 0) >= MAX_A_SITE or _total[0] >= MAX_IN_ALL:
        return
    _counts[site] = _counts.get(site, 0) + 1
    _total[0] += 1
    values: list[float] = []
    leaves = _leaves(given, values)
    metric = nonlinear.look(sites.stack(3, 4), op, GATHERS[op]) if _counts[site] == 1 else None
    classes = _classes(given) if _counts[site] <= MAX_CLASSED else None
    numbered = shardorder.numbered(site) if _counts[site] == 1 and leaves > MAX_NUMEL else None
    listed = _counts[site] == 1 and isinstance(given, list)
    zipped = zippedparts.zipped_after(site, op) if listed else None
    strict = listed and zipped is None and zippedparts.zipped_after(site, op, strict=True) is not None
    S.recorder.event(
        "gathered", site, op=op, metric=metric, values=values if leaves == len(values) <= MAX_NUMEL else [], leaves=leaves,
        at_t=time.time_ns(), at=S.steps, way=_way(), cut=_may_cut(),
        **({"numbered": sites.as_json(numbered)} if numbered is not None else {}), **(classes or {}),
        **({"zipped": sites.as_json(zipped), "items": len(given)} if zipped is not None else {}),
        **({"strict": True} if strict else {}),
    )  # fmt: skip


def _classes(given: Any) -> dict[str, Any] | None:
    """Predicted classes, one a sample: digests as the loader sensor takes them of labels, and where the parts are joined."""
    plain = hasattr(given, "dtype") and hasattr(given, "is_floating_point") and digests.plain(given)
    if not plain or given.dim() not in (1, 2) or given.device.type != "cpu" or not 8 <= given.shape[0] <= MAX_CLASSES:
        return None
    scores = given.dim() == 2 and given.is_floating_point() and 2 <= given.shape[1] <= MAX_COLUMNS
    if not scores and (given.dim() != 1 or given.is_floating_point()):
        return None
    joined = origins.joined_after(sites.here(4))
    told = datasets.pack(datasets.row_digests(given.detach().argmax(1) if scores else given, MAX_CLASSES))
    return {"scored" if scores else "classes": told, "joined": sites.as_json(joined) if joined is not None else None}


_cut: list[bool] = []


def _may_cut() -> bool:
    if not _cut:
        _cut.append(cuts.any_cut())
    return _cut[0]


def _leaves(given: Any, values: list[float], depth: int = 0) -> int:
    """How many numbers an object holds (bounded); those of small CPU tensors and plain ones are collected."""
    if isinstance(given, (int, float)):
        values.append(float(given))
        return 1
    if hasattr(given, "numel"):
        if given.device.type == "cpu" and given.numel() <= MAX_NUMEL and digests.plain(given):
            values.extend(float(v) for v in given.detach().flatten().tolist())
        return int(given.numel())
    if hasattr(given, "size") and hasattr(given, "dtype"):
        return int(given.size)
    if isinstance(given, (list, tuple, set, dict)) and depth < 4:
        inner = list(given.values() if isinstance(given, dict) else given)
        return sum(_leaves(v, values, depth + 1) for v in inner[:2000])
    return 1


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
    for op, position in GATHERS.items():
        if wrap(c10d, op, _make_gather(op, position)):
            setattr(dist, op, getattr(c10d, op))
    at_close.append(quiet(flush))
