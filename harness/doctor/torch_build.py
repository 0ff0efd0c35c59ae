"""Torch's build against the GPU driver of this machine."""

from __future__ import annotations

from collections.abc import Iterable

from harness.doctor.line import ERROR, OK, WARNING, Host, Line

WHY = "a CPU build of torch beside a GPU trains on the CPU without a word; a build newer than the driver sees no GPU"


def look(host: Host) -> Iterable[Line]:
    if not host.torch:
        return []
    return [_line(host)]


def _line(host: Host) -> Line:
    torch = host.torch
    if "import_error" in torch:
        return _say(ERROR, f"torch cannot be imported: {torch['import_error']}", f"install torch for {host.python}")
    build = f"cuda {torch['cuda']}" if torch.get("cuda") else f"rocm {torch['hip']}" if torch.get("hip") else "cpu"
    says = f"torch {torch.get('version')} ({build})"
    if not has_driver(host):
        return _say(OK, f"{says}, no GPU driver here")
    if build == "cpu":
        return _say(ERROR, f"{says}, but this machine has a GPU", "install a CUDA build of torch (see pytorch.org), or run with --device cpu")
    nvml = torch.get("nvml") or {}
    driver = nvml.get("driver_cuda")
    if torch.get("cuda") and isinstance(driver, list) and newer_major(str(torch["cuda"]), driver):
        fix = f"update the driver, or install a build for CUDA {driver[0]}.{driver[1]} or older"
        return _say(ERROR, f"{says}, but driver {nvml.get('driver')} knows CUDA {driver[0]}.{driver[1]} at most", fix)
    if not torch.get("cuda_available"):
        return _say(WARNING, f"{says}, but torch sees no GPU", "look at CUDA_VISIBLE_DEVICES and at nvidia-smi")
    return _say(OK, f"{says}, driver {nvml.get('driver') or 'there'}")


def has_driver(host: Host) -> bool:
    nvidia = any(p.name[6:].isdigit() for p in host.dev.glob("nvidia*")) or (host.proc / "driver/nvidia/version").exists()
    return nvidia or (host.dev / "kfd").exists()


def newer_major(build: str, driver: list[int]) -> bool:
    """Whether the build's CUDA is of a newer major version than the driver's: minor versions are compatible."""
    major = build.split(".")[0]
    return major.isdigit() and bool(driver) and int(major) > int(driver[0])


def _say(level: str, says: str, fix: str = "") -> Line:
    return Line("torch build", level, says, WHY, fix)
