"""Gloo on one node talks over loopback where nobody names an interface: a host name that resolves to another one makes it wait or fail.

Named while a process group is made and taken back after it, so that the script finds the environment that torchrun would give it:
`os.environ.setdefault("GLOO_SOCKET_IFNAME", "ib0")` in a script has to act, and to fail, here as there.
"""

from __future__ import annotations

import os
from typing import Any

from .. import protocol
from ..patching import wrap

NAME = "GLOO_SOCKET_IFNAME"


def _on_loopback(original: Any) -> Any:
    def helper(*args: Any, **kwargs: Any) -> Any:
        pinned = os.environ.get(protocol.ENV_INTERFACE)
        if not pinned or NAME in os.environ:
            return original(*args, **kwargs)
        os.environ[NAME] = pinned
        try:
            return original(*args, **kwargs)
        finally:
            os.environ.pop(NAME, None)

    return helper


def arm() -> None:
    import torch.distributed as dist

    if dist.is_available():
        wrap(dist.distributed_c10d, "_new_process_group_helper", _on_loopback)
