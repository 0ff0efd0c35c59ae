"""Tensors that the script's processes hand to each other through queues and pipes of multiprocessing: they share memory, nothing is copied.

Event "message_put" (site) and "message_got" (site): shape (digest of the shapes), digest (of the content, taken before it is handed over, and
right after it was taken out), num (tensors), last (this process looks at no more). Only what the user's own code puts and takes; messages that
hold live weights (a state dict that actors pull) are left out, so are tensors on a device.
"""

from __future__ import annotations

import sys
from typing import Any
from zlib import crc32

from .. import digests, sites
from ..arm import on_import
from ..patching import quiet, wrap
from ..state import S
from . import steps

MAX_TENSORS = 16  # of one message
MAX_MESSAGES = 512  # a process and direction; 20 us each, most of it the event
MAX_BYTES = 64_000_000  # all of them; 0.6 ms a MB
_looked: dict[tuple[int, str], list[int]] = {}  # process (a forked one counts anew) and direction -> messages, bytes


def _count(kind: str) -> list[int]:
    return _looked.setdefault((S.recorder.pid, kind), [0, 0])


def _is_over(kind: str) -> bool:
    num, size = _count(kind)
    return num >= MAX_MESSAGES or size >= MAX_BYTES


def _from_user() -> bool:
    """Whether the user's code calls, by itself or through put_nowait()."""
    frame: Any = sys._getframe(2)
    if frame.f_code.co_name in ("put_nowait", "get_nowait"):
        frame = frame.f_back
    return frame is not None and sites.is_user_code(frame.f_code)


def _tensors(item: Any) -> list[Any]:
    """The dense CPU tensors of a message; none where it holds weights, which are meant to be seen as they are now."""
    found = digests.of_batch(item)[:MAX_TENSORS]
    if not found or any(t.requires_grad or t.device.type != "cpu" for t in found):
        return []
    weights = steps.weights()
    return [] if any(t.data_ptr() in weights for t in found) else found


def _look(kind: str, item: Any) -> dict[str, Any] | None:
    import torch

    tensors = _tensors(item)
    if not tensors:
        return None
    looked, shape, digest = _count(kind), 0, 0
    with torch.no_grad():
        for tensor in tensors:
            shape = crc32(repr((tuple(tensor.shape), str(tensor.dtype))).encode(), shape)
            digest = crc32(digests.to_bytes(tensor.detach().reshape(-1)), digest)
            looked[1] += tensor.numel() * tensor.element_size()
    looked[0] += 1
    return {"shape": shape, "digest": digest, "num": len(tensors), "last": _is_over(kind)}


_look_quietly = quiet(_look)


def _put(original: Any) -> Any:
    def put(self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        told = None if _is_over("message_put") or not _from_user() else _look_quietly("message_put", obj)
        result = original(self, obj, *args, **kwargs)
        if told:
            S.recorder.event("message_put", sites.here(2), **told)
        return result

    return put


def _get(original: Any) -> Any:
    def get(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if not _is_over("message_got") and _from_user() and (told := _look_quietly("message_got", result)):
            S.recorder.event("message_got", sites.here(2), **told)
        return result

    return get


def _queues(module: Any) -> None:
    for kind in ("Queue", "JoinableQueue", "SimpleQueue"):
        owner = getattr(module, kind)
        for name, make in (("put", _put), ("get", _get)):
            if name in vars(owner):
                wrap(owner, name, make)


def _pipes(module: Any) -> None:
    wrap(module.Connection, "send", _put)
    wrap(module.Connection, "recv", _get)


def arm() -> None:
    on_import("multiprocessing.queues", _queues)
    on_import("multiprocessing.connection", _pipes)
