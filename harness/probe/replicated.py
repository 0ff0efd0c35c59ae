"""Which tensors are parameters that a DDP wrapper keeps equal, or that are trained beside it, or buffers of its model's own, told by their memory:
`p.data` and `p.detach()` are other objects over the same."""

from __future__ import annotations

from typing import Any

from . import digests
from .state import S

_addresses: dict[int, int] = {}  # where a wrapped parameter lies -> how many elements it has
_buffers: dict[int, tuple[str, int]] = {}  # where a buffer lies that is no normalisation's -> name, how many elements it has
_beside: dict[int, int] = {}  # where an optimizer's parameter lies that no DDP object covers -> how many elements it has
_read_at = [(-1, -1)]
EVERY = 16  # steps: a model may be moved, or its data bound anew


def digest(tensor: Any) -> int:
    """Of a wrapped parameter, whole, that DDP was not told to ignore; 0 for other tensors."""
    at = _address(tensor)
    return digests.of_tensors([tensor])[1][0] if at and _addresses.get(at) == tensor.numel() else 0


def beside(tensor: Any) -> bool:
    """Whether it is a trained parameter, whole, that DDP does not cover: the script has to keep it equal itself."""
    at = _address(tensor)
    return bool(at) and _beside.get(at) == tensor.numel()


def buffer(tensor: Any) -> str:
    """The name of a wrapped model's floating point buffer that is no normalisation's, whole; empty for other tensors."""
    at = _address(tensor)
    name, num = _buffers.get(at, ("", 0)) if at else ("", 0)
    return name if num and tensor.numel() == num else ""


def _address(tensor: Any) -> int:
    """0 where there is nothing to be compared with. What lies where is read at one step in 16, 1 us a tensor."""
    key = (len(S.ddps), S.steps // EVERY)
    if _read_at[0] != key:
        _read_at[0] = key
        _read()
    return digests.address(tensor) if tensor is not None and S.ddps and tensor.device.type != "meta" else 0


def _read() -> None:
    from . import marks

    for table in (_addresses, _buffers, _beside):
        table.clear()
    for wrapped in S.ddps:
        for p in (p for key, ref in wrapped.refs.items() if wrapped.names[key] not in wrapped.ignored and (p := ref()) is not None):
            _addresses[digests.address(p)] = int(p.numel())
        held = dict(model.module.named_buffers()) if wrapped.own_buffers and (model := wrapped.ref()) is not None else {}
        for name in wrapped.own_buffers[:50]:
            if (b := held.get(name)) is not None and (at := digests.address(b)):
                _buffers[at] = (name, int(b.numel()))
    for p in (p for o in marks.optimizers() for g in o.param_groups for p in g["params"]) if S.ddps else ():
        if (at := digests.address(p)) and at not in _addresses:
            _beside[at] = int(p.numel())
