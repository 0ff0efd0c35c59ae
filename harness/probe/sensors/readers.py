"""Arrays that numpy reads whole, by the file and the statement that asks for them: how often, and how long it takes.

Told as saving.py tells torch.load: event "reload" (at 32, 64, 128, ... reads of one array by one statement). Nothing that a script can name is replaced:
`numpy.load` reads an .npy through `numpy.lib.format.read_array`, and an archive's `__getitem__` unpacks one of its arrays.
"""

from __future__ import annotations

import sys
import time
from types import ModuleType
from typing import Any

from .. import sites
from ..arm import on_import
from ..patching import quiet, wrap
from ..state import S
from . import saving

LEAST_S = 1e-4  # a read that takes less is no burden, and to note it would be one


@quiet
def _note(path: str, took_s: float) -> None:
    frame = sites.user_frame(sys._getframe(3))
    if path and frame is not None:
        saving.note_reload(path, sites.of_frame(frame), took_s)


def _array(original: Any) -> Any:
    def read_array(fp: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(fp, *args, **kwargs)
        took_s = time.perf_counter() - began
        if took_s >= LEAST_S and not S.busy:
            _note(saving.path_of(fp), took_s)
        return result

    return read_array


def _member(original: Any) -> Any:
    def getitem(self: Any, key: Any) -> Any:
        began = time.perf_counter()
        result = original(self, key)
        took_s = time.perf_counter() - began
        archive = getattr(getattr(self, "zip", None), "filename", None)
        if took_s >= LEAST_S and not S.busy and isinstance(archive, str):
            _note(f"{saving.path_of(archive)}/{key}", took_s)
        return result

    return getitem


def _arm_numpy(numpy: ModuleType) -> None:
    library = getattr(numpy, "lib", None)
    if (layout := getattr(library, "format", None)) is not None:
        wrap(layout, "read_array", _array)
    if (archive := getattr(getattr(library, "npyio", None), "NpzFile", None)) is not None:
        wrap(archive, "__getitem__", _member)


def arm() -> None:
    on_import("numpy", _arm_numpy)
