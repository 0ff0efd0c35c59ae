"""Stores of torch's that the script makes itself, to meet its other processes at: `dist.TCPStore(host, port, world_size)`.

Event "store" (done=False before, True after): host, port, world_size, is_master. The constructor waits for the others as init_process_group does,
and was a silence of code in which nobody waits. Those that torch makes within init_process_group belong to that call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import sites
from ..patching import wrap
from ..state import S
from . import beat

PLACES = ("host_name", "port", "world_size", "is_master")


def _make(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        site = sites.here(2)
        if S.in_collective or S.recorder.disabled or not sites.is_user_file(site[0]):
            original(self, *args, **kwargs)
            return
        given = {**dict(zip(PLACES, args, strict=False)), **kwargs}
        told = {key: value for key, value in given.items() if key in PLACES and isinstance(value, (str, int))}
        beat.start()
        S.recorder.event("store", site, done=False, **told)
        S.recorder.enter("store", site)
        try:
            original(self, *args, **kwargs)
        finally:
            S.recorder.leave()
        S.recorder.event("store", site, done=True, **told)

    return __init__


def arm() -> None:
    import torch.distributed as dist

    if dist.is_available():
        from torch._C import _distributed_c10d as c10d

        wrap(c10d.TCPStore, "__init__", _make)
