"""How long the workers of a loader take to end where the script lets go of their iterator: `next(iter(loader))`, a `break`.

They are in the middle of batches that nobody will draw. The seconds are the last of the four `times` of its "pass" event, see loader.py, which at a pass
to its end are those of the call that found the end, with the workers' end in it.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from ..patching import quiet, wrap
from ..state import S
from . import loader


def _ending(original: Any) -> Any:
    def _shutdown_workers(self: Any, *args: Any, **kwargs: Any) -> Any:
        if sys is None or sys.is_finalizing():  # what this file imports may be gone
            return original(self, *args, **kwargs)
        began = time.perf_counter()
        try:
            return original(self, *args, **kwargs)
        finally:
            _note(id(self), time.perf_counter() - began)

    return _shutdown_workers


@quiet
def _note(iterator: int, took_s: float) -> None:
    """The weak reference to the iterator dies after its __del__: its pass is still open. One that has come to its end takes its own time."""
    one = loader.open_pass(iterator)
    if one is not None and not S.recorder.disabled:
        one.times[3] += took_s


def arm() -> None:
    from torch.utils.data import dataloader

    wrap(dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers", _ending)
