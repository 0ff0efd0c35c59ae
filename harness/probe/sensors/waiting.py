"""Says on the status page that this process waits for a collective that was started without waiting: `Work.wait()` of `async_op=True`, isend and irecv,
and the wait that torch.distributed._functional_collectives (DTensor's too) puts off until a result is used.

A call that waits by itself says so under its own name (sensors/collectives.py). About 1 us a wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..arm import on_import
from ..patching import wrap
from ..seethrough import traceable
from ..state import S

WAIT = "wait"
_main = threading.main_thread().ident


def _make(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:  # by its name and its first argument pybind knows that no subclass of Work overrides it
        recorder = S.recorder
        if recorder.disabled or recorder.inside or threading.get_ident() != _main:
            return original(self, *args, **kwargs)
        recorder.enter(WAIT, None)  # where it is the beat finds out, should it last
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.leave()

    return wait


def _arm_functional(module: Any) -> None:
    traceable(module, "wait_tensor", _make)


def arm() -> None:
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch._C._distributed_c10d import Work

    wrap(Work, "wait", _make)
    on_import("torch.distributed._functional_collectives", _arm_functional)
