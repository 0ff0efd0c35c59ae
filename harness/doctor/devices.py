"""The GPUs: how many are visible, and whether others use them."""

from __future__ import annotations

from collections.abc import Iterable

from harness.doctor.line import OK, WARNING, Host, Line

WHY = "a rank without a GPU of its own, or with one that another job has filled, ends by an out-of-memory error that seems to be the script's"
BUSY_SHARE = 0.1  # of its memory in use before we begin


def look(host: Host) -> Iterable[Line]:
    if not host.torch or "import_error" in host.torch:
        return
    if not host.gpus:
        yield Line("devices", OK, "no GPU visible: ranks run on the CPU", WHY)
        return
    num = len(host.gpus)
    says = f"{num} GPU{'s' * (num > 1)} visible"
    if num < host.nproc:
        yield Line("devices", WARNING, f"{says} for {host.nproc} ranks", WHY, f"take -n {num} or --device cpu; look at CUDA_VISIBLE_DEVICES")
    else:
        yield Line("devices", OK, f"{says} for {host.nproc} ranks", WHY)
    yield from _filled(host)


def _filled(host: Host) -> Iterable[Line]:
    """NVML counts all GPUs of the machine, in the order of the bus."""
    physical = (host.torch.get("nvml") or {}).get("physical")
    for index, one in enumerate(physical if isinstance(physical, list) else []):
        used, total = one.get("used_bytes", 0), one.get("total_bytes", 0)
        if total and used > BUSY_SHARE * total:
            says = f"GPU {index} of the machine already holds {used / 2**30:.1f} of {total / 2**30:.1f} GiB"
            yield Line("devices", WARNING, says, WHY, "look at nvidia-smi for whose it is; choose others by CUDA_VISIBLE_DEVICES")
