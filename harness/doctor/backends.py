"""The communication backends of this build of torch."""

from __future__ import annotations

from collections.abc import Iterable

from harness.doctor.line import ERROR, OK, WARNING, Host, Line

WHY = "init_process_group fails on every rank where its backend is not built in"


def look(host: Host) -> Iterable[Line]:
    torch = host.torch
    if not torch or "import_error" in torch:
        return []
    if not torch.get("distributed"):
        return [Line("backends", ERROR, "this torch was built without torch.distributed", WHY, "install an official build of torch")]
    lines = [Line("backends", OK, "gloo", WHY) if torch.get("gloo") else Line("backends", ERROR, "gloo is missing", WHY, "install an official build of torch")]
    if host.gpus:
        version = ".".join(str(part) for part in torch.get("nccl_version") or ())
        missing = Line("backends", WARNING, "GPUs are here, but nccl is missing", WHY, "install a CUDA build; until then --backend gloo, which is slow")
        lines.append(Line("backends", OK, f"nccl {version}", WHY) if torch.get("nccl") else missing)
    return lines
