"""What torch says about itself and the GPUs: asked in a child process, because the controller never imports torch. Costs an import."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

PATIENCE_S = 120.0
# No context is made on any GPU: properties come from the driver, free memory from NVML where nvidia-smi's library is there.
PROGRAM = r"""
import json, sys
said = {}
def ask(name, call):
    try:
        said[name] = call()
    except Exception as error:
        said[name + "_error"] = f"{type(error).__name__}: {error}"
def device(i):
    p = torch.cuda.get_device_properties(i)
    return {"index": i, "name": p.name, "capability": [p.major, p.minor], "total_bytes": p.total_memory}
def nvml():
    import ctypes
    lib = ctypes.CDLL("libnvidia-ml.so.1")
    if lib.nvmlInit_v2():
        return {}
    number, text = ctypes.c_int(), ctypes.create_string_buffer(96)
    lib.nvmlSystemGetCudaDriverVersion(ctypes.byref(number))
    lib.nvmlSystemGetDriverVersion(text, 96)
    class Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]
    count = ctypes.c_uint()
    lib.nvmlDeviceGetCount_v2(ctypes.byref(count))
    used = []
    for i in range(count.value):
        handle, memory = ctypes.c_void_p(), Memory()
        lib.nvmlDeviceGetHandleByIndex_v2(i, ctypes.byref(handle))
        lib.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        used.append({"total_bytes": memory.total, "used_bytes": memory.used})
    return {"driver": text.value.decode(), "driver_cuda": [number.value // 1000, number.value % 1000 // 10], "physical": used}
try:
    import torch
except BaseException as error:
    print(json.dumps({"import_error": f"{type(error).__name__}: {error}"}))
    sys.exit()
import torch.distributed as dist
ask("version", lambda: str(torch.__version__))
ask("file", lambda: torch.__file__)
ask("cuda", lambda: torch.version.cuda)
ask("hip", lambda: getattr(torch.version, "hip", None))
ask("distributed", dist.is_available)
ask("gloo", dist.is_gloo_available)
ask("nccl", dist.is_nccl_available)
ask("nccl_version", lambda: list(torch.cuda.nccl.version()) if dist.is_nccl_available() else None)
ask("cudnn", lambda: torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None)
ask("arch_list", torch.cuda.get_arch_list)
ask("cuda_available", torch.cuda.is_available)
ask("devices", lambda: [device(i) for i in range(torch.cuda.device_count())])
ask("nvml", nvml)
print(json.dumps(said))
"""


def ask(python: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Torch's answers; {"import_error": why} where there are none."""
    env = {name: value for name, value in environ.items() if not name.startswith("_HARNESS_")}
    try:
        done = subprocess.run([python, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"import_error": f"{type(error).__name__}: {error}"}
    return answer(done.stdout, done.stderr, done.returncode)


def answer(stdout: str, stderr: str, code: int) -> dict[str, Any]:
    """The last line of its output: what torch prints at import stands before it."""
    lines = stdout.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        said = None
    if isinstance(said, dict):
        return said
    last = stderr.strip().splitlines()[-1:] or [f"it ended with {code} and said nothing"]
    return {"import_error": last[0][:300]}
