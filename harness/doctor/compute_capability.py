"""Whether torch was built for the GPUs that are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.doctor.line import ERROR, OK, Host, Line

WHY = 'a kernel that was not built for this GPU ends the run with "no kernel image is available", often only in the first backward'


def look(host: Host) -> Iterable[Line]:
    listed = host.torch.get("arch_list")
    if not host.gpus or not isinstance(listed, list) or not host.torch.get("cuda"):
        return
    for gpu in host.gpus:
        capability = gpu.get("capability") or [0, 0]
        name = f"sm_{capability[0]}{capability[1]}"
        says = f"GPU {gpu.get('index')} ({gpu.get('name')}) is {name}"
        if fits(capability, listed):
            yield Line("compute capability", OK, f"{says}, which this build supports", WHY)
        else:
            fix = "install a build of torch that lists it, or take another GPU by CUDA_VISIBLE_DEVICES"
            yield Line("compute capability", ERROR, f"{says}, but this build has {', '.join(map(str, listed))}", WHY, fix)


def fits(capability: Sequence[int], listed: Sequence[str]) -> bool:
    """Binaries run on the same major version with an equal or higher minor one; PTX (compute_) is compiled for anything newer."""
    for entry in listed:
        kind, _, digits = str(entry).partition("_")
        number = "".join(c for c in digits if c.isdigit())
        if len(number) < 2:
            continue
        major, minor = int(number[:-1]), int(number[-1])
        if kind == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if kind == "compute" and (major, minor) <= (capability[0], capability[1]):
            return True
    return False
