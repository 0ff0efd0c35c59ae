"""Arms this process: opens its recording, hooks exits and forks, and patches torch as soon as the script imports it."""

from __future__ import annotations

import atexit
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import protocol, sites
from .recorder import Recorder
from .state import S

_MAIN_MARK = "_HARNESS_MAIN_PID"  # set by the first armed process of a rank, inherited by its children
_after_import: dict[str, list[Callable[[ModuleType], None]]] = {}


def arm() -> None:
    """Once a process. Cheap: nothing of torch is imported here."""
    main = not os.environ.get(_MAIN_MARK)
    if main:
        os.environ[_MAIN_MARK] = str(os.getpid())
    S.reset()  # a warm server may have made it minutes ago
    S.recorder = Recorder(os.environ[protocol.ENV_RUN_DIR], "main" if main else "child")
    if main:
        S.recorder.start()
    os.register_at_fork(after_in_child=_after_fork)
    atexit.register(close, "exit")
    from . import failures

    failures.arm()
    sys.meta_path.insert(0, _Finder())
    on_import("torch", _arm_torch)


def on_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Run `call(module)` as soon as `name` has been imported; at once if it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        call(module)
    else:
        _after_import.setdefault(name, []).append(call)


class _Loader:
    """Runs the callbacks after the real loader has executed the module."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._inner, attribute)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        for call in _after_import.pop(self._name, []):
            try:
                call(module)
            except Exception as error:
                S.recorder.event(protocol.PROBE_ERROR, where=f"import {self._name}", error=repr(error)[:300])


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _after_import:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, name)  # type: ignore[assignment]
                return spec
        return None


def _arm_torch(torch: ModuleType) -> None:
    began = time.perf_counter()
    package = importlib.import_module(__package__ + ".sensors")
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda i: i.name):
        try:
            importlib.import_module(f"{package.__name__}.{info.name}").arm()
        except Exception as error:  # another torch version: this sensor is missing, and the report says so
            S.recorder.event(protocol.PROBE_ERROR, where=f"sensor {info.name}", error=repr(error)[:300])
    if S.recorder.role == "main":
        S.recorder.event(
            protocol.TORCH,
            version=str(torch.__version__),
            cuda=getattr(getattr(torch, "version", None), "cuda", None),
            threads=torch.get_num_threads(),
            armed_s=round(time.perf_counter() - began, 4),
        )


def _after_fork() -> None:
    """A forked child is a process of its own. Whether it is a loader worker is known in multiprocessing's _bootstrap (failures.py)."""
    parent = S.recorder
    S.recorder = Recorder(parent.run_dir, "child")
    S.recorder.disabled = parent.disabled
    parent.forget()
    S.busy = False
    S.reset_for_child()


def close(how: str, code: int | None = None) -> None:
    """The last event of this process; later calls do nothing."""
    recorder = S.recorder
    if recorder.closed or recorder.disabled or (recorder.role == "child" and not recorder._fds):
        return
    for call in list(at_close):
        try:
            call()
        except Exception as error:
            recorder.event(protocol.PROBE_ERROR, where="close", error=repr(error)[:300])
    recorder.flush()
    recorder.phase("ended")
    recorder.event(
        protocol.END, how=how, code=code, steps=S.steps, probe_s=round(S.probe_s, 6), errors=recorder.errors, lost_steps=recorder.lost_steps
    )
    recorder.closed = True


at_close: list[Callable[[], None]] = []
_ = sites  # imported early, so that its tables exist before the script changes sys.path
