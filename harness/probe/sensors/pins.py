"""Who binds this process to cores: only a call of the script's own counts, what the launcher or the scheduler bound it to is inherited.

Event "pinned" (first 16 calls for this process): site, before, after (cores it may run on, before the call and after it).
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from .. import sites
from ..arm import on_import
from ..patching import quiet, wrap
from ..state import S

MAX_CALLS = 16
_num = [0]


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _look(call: Any, site: sites.Site) -> Any:
    """The result of the call, told with what it changed."""
    before = _cores()
    result = call()
    _num[0] += 1
    _tell(site, before)
    return result


@quiet
def _tell(site: sites.Site, before: list[int]) -> None:
    S.recorder.event("pinned", site, before=before, after=_cores())


def _is_for_us(pid: Any) -> bool:
    return pid in (0, os.getpid()) and _num[0] < MAX_CALLS and not S.recorder.disabled


def _of_os(original: Any) -> Any:
    def sched_setaffinity(pid: Any, mask: Any, /) -> Any:
        if _is_for_us(pid) and sites.is_user_code(sys._getframe(1).f_code):
            return _look(lambda: original(pid, mask), sites.here(2))
        return original(pid, mask)

    return sched_setaffinity


def _of_psutil(original: Any) -> Any:
    def cpu_affinity(self: Any, cpus: Any = None) -> Any:
        if cpus is not None and _is_for_us(self.pid) and sites.is_user_code(sys._getframe(1).f_code):
            return _look(lambda: original(self, cpus), sites.here(2))
        return original(self, cpus)

    return cpu_affinity


def _arm_psutil(psutil: ModuleType) -> None:
    if hasattr(psutil.Process, "cpu_affinity"):
        wrap(psutil.Process, "cpu_affinity", _of_psutil)


def arm() -> None:
    if hasattr(os, "sched_setaffinity"):
        wrap(os, "sched_setaffinity", _of_os)
    on_import("psutil", _arm_psutil)
