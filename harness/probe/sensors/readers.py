"""Readers of whole files other than torch.load, by the file and the statement that calls them: how often, and how long it takes.

Told as saving.py tells torch.load: event "reload" (at 32, 64, 128, ... calls for one file by one statement). What numpy reads lazily is timed
where it is read: `numpy.load` of an .npz opens it, and `archive["x"]` unpacks the whole array.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from types import ModuleType
from typing import Any

from .. import sites
from ..arm import on_import
from ..patching import quiet, wrap
from ..state import S
from . import saving

NUMPY, PANDAS = ("load", "loadtxt", "genfromtxt"), ("read_csv", "read_parquet", "read_json", "read_pickle")


@quiet
def _note(source: Any, caller: Any, took_s: float) -> None:
    saving.note_reload(getattr(getattr(source, "zip", None), "filename", None) or source, sites.of_frame(caller), took_s)


def _timed(original: Any) -> Any:
    def read(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if S.busy or not args or not sites.is_user_code(caller.f_code):
            return original(*args, **kwargs)
        began = time.perf_counter()
        result = original(*args, **kwargs)
        _note(args[0], caller, time.perf_counter() - began)
        return result

    return read


def _arm_numpy(numpy: ModuleType) -> None:
    for name in NUMPY:
        wrap(numpy, name, _timed)
    archive = getattr(getattr(getattr(numpy, "lib", None), "npyio", None), "NpzFile", None)
    if archive is not None:
        wrap(archive, "__getitem__", _timed)


def _arm_pandas(pandas: ModuleType) -> None:
    for name in PANDAS:
        wrap(pandas, name, _timed)


def arm() -> None:
    wrap(json, "load", _timed)
    wrap(pickle, "load", _timed)
    on_import("numpy", _arm_numpy)
    on_import("pandas", _arm_pandas)
