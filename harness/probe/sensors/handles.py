"""Collectives that were started with `async_op=True` and that nobody waited for before their tensor was used.

Only calls that stand in the user's own code, on tensors of the CPU (on a device a synchronisation of the device waits for them too), in the
first 256 steps. Any question to the handle counts as waiting: wait, is_completed, get_future, result.
Event "unwaited" (once a call site and way): site, op, way ("step": an optimizer steps with the gradient that is still being reduced;
"dropped": the handle is gone), grad (the tensor is a gradient), numel.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from .. import digests, protocol, sites
from ..patching import quiet
from ..state import S

OPS = {"all_reduce", "reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", *protocol.GATHER_INTO, *protocol.REDUCE_SCATTER_INTO}
QUESTIONS = ("wait", "synchronize", "is_completed", "is_success", "get_future", "get_future_result", "result", "exception", "block_current_stream")
NUM_STEPS, MAX_OPEN, MAX_TOLD = 256, 4096, 16


class Handle:
    """One call whose Work was handed to the script."""

    __slots__ = ("address", "grad", "numel", "op", "ref", "site")

    def __init__(self, op: str, site: sites.Site, tensor: Any, grad: bool) -> None:
        self.op, self.site, self.grad = op, site, grad
        self.address, self.numel = digests.address(tensor), int(tensor.numel())
        self.ref: Any = None


_open: dict[int, Handle] = {}  # by id of the living Work
_dropped: list[Handle] = []  # gradients whose Work is gone: the next step uses them
_told: set[tuple[sites.Site, str]] = set()
_patched = [False]


@quiet
def note(op: str, args: Any, kwargs: Any, work: Any, site: sites.Site) -> None:
    """After a call that returned something."""
    from torch._C._distributed_c10d import Work

    from . import collectives

    if type(work) is not Work or not _by_user(sys._getframe(2)) or len(_open) >= MAX_OPEN:
        return
    gradient_only = op == "reduce" and _sends_only(args, kwargs)
    tensors = [a for a in (*args, *kwargs.values()) if hasattr(a, "numel") and hasattr(a, "is_cpu")]
    if not tensors or not tensors[0].is_cpu:
        return
    grad = collectives.is_gradient(tensors[0])
    if grad or not gradient_only:
        _patch(Work)
        follow(work, Handle(op, site, tensors[0], grad))


def _sends_only(args: Any, kwargs: Any) -> bool:
    """Whether the result of a reduce goes to another rank: this one may go on, as who broadcasts may, and has no result to wait for."""
    import torch.distributed as dist

    dst = kwargs.get("dst", args[1] if len(args) > 1 else None)
    return isinstance(dst, int) and dst != dist.get_rank()


def follow(work: Any, handle: Handle) -> None:
    """From now on until it is asked or gone."""
    key = id(work)
    handle.ref = weakref.ref(work, lambda _: _gone(key))
    _open[key] = handle


def _by_user(frame: FrameType | None) -> bool:
    """Whether the user's code made this call itself: what torch starts for its own wrappers, it waits for."""
    frame = sites.beyond_ours(frame)
    return frame is not None and sites.is_user_code(frame.f_code)


def _patch(kind: Any) -> None:
    if _patched[0]:
        return
    _patched[0] = True
    for name in QUESTIONS:
        if (original := getattr(kind, name, None)) is not None:
            setattr(kind, name, _asking(original, name))


def _asking(original: Any, name: str) -> Any:
    def ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        _open.pop(id(self), None)
        return original(self, *args, **kwargs)

    ask.__code__ = ask.__code__.replace(co_name=name)  # by which pybind knows that no subclass of Work overrides it
    return ask


def _gone(key: int) -> None:
    """The last reference to a Work went away; not at exit, when everything goes."""
    handle = _open.pop(key, None)
    if handle is None or sys.is_finalizing() or S.group is None:
        return
    if handle.grad:
        _dropped.append(handle)
        del _dropped[:-MAX_OPEN]
    else:
        _tell_alone(handle, "dropped")


def _tell(handle: Handle, way: str) -> None:
    if (handle.site, way) not in _told and len(_told) < MAX_TOLD:
        _told.add((handle.site, way))
        S.recorder.event("unwaited", handle.site, op=handle.op, way=way, grad=handle.grad, numel=handle.numel)


_tell_alone = quiet(_tell)


def _at_step(optimizer: Any) -> None:
    if not _open and not _dropped:
        return
    if S.steps >= NUM_STEPS:
        _open.clear()
    at = {digests.address(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for handle in (*_open.values(), *_dropped):
        if handle.grad and handle.address in at:
            _tell(handle, "step")
    _dropped.clear()


def arm() -> None:
    from . import steps

    steps.at_any_step.append(_at_step)
