"""cuDNN: there, and switched on."""

from __future__ import annotations

from collections.abc import Iterable

from harness.doctor.line import OK, WARNING, Host, Line

WHY = "without cuDNN convolutions fall back to slow kernels, and some layers do not work at all"


def look(host: Host) -> Iterable[Line]:
    if not host.gpus or host.torch.get("hip"):
        return []
    version = host.torch.get("cudnn")
    if version:
        return [Line("cudnn", OK, f"cuDNN {version}", WHY)]
    return [Line("cudnn", WARNING, "cuDNN is not available", WHY, "install a build of torch that brings cuDNN; look at LD_LIBRARY_PATH")]
