"""Which device this process uses, what the machine has, and what was moved too late.

Event "devices" (at the first step, again at the end): when ("step" | "end"), stand_in, visible (CUDA_VISIBLE_DEVICES or null), count,
current, uuid (of current), uuids, contexts (devices on which this process holds a context), chosen (set_device was called), driver (an
NVIDIA driver is loaded), build (CUDA version of torch or ""), capability, arch_list, cudnn, names, threads.
Event "set_device": device, site. Event "rendezvous" (before init_process_group): rank, world_size, local_rank, address, port, attempt (of
torchrun), as the environment says then; asked_rank, asked_world_size, asked_backend, method, foreign (a
numeric address to meet at that no interface of this machine has; "" otherwise) and set_at (the line of the script that holds it).
Event "moved_late": how many parameters that a living optimizer or DDP object holds were replaced or changed device: replaced, changed,
held_by ("optimizer" | "ddp"), from_devices, to_devices, module, site.

A machine without GPUs can be given a stand-in table, so that the logic is tested: _HARNESS_DEVICE_TABLE='[{"uuid": "GPU-0"}, ...]'. Then
device_count, current_device and set_device of torch.cuda answer from the table (tensors stay on the CPU), `contexts` are the devices that
were set, and the event says stand_in.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import linecache
import os
import re
import socket
import sys
from typing import Any

from .. import sites
from ..arm import at_close
from ..patching import before, quiet, wrap
from ..state import S
from . import beat, ddp, steps

ENV_TABLE = "_HARNESS_DEVICE_TABLE"
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")
_told: set[int] = set()
_chosen: list[int] = []
_table: list[list[dict[str, Any]]] = []


def _stand_in() -> list[dict[str, Any]]:
    """The stand-in table as CUDA_VISIBLE_DEVICES shows it; empty: there is none."""
    if not _table:
        try:
            rows = json.loads(os.environ.get(ENV_TABLE, "[]"))
        except ValueError:
            rows = []
        _table.append([row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else [])
    rows, visible = _table[0], os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not rows:
        return rows
    by_name = {str(i): row for i, row in enumerate(rows)} | {str(row.get("uuid")): row for row in rows}
    found: list[dict[str, Any]] = []
    for name in visible.split(","):
        if name.strip() not in by_name:
            break  # as CUDA does: the list ends at the first one that it does not know
        found.append(by_name[name.strip()])
    return found


def describe(torch: Any) -> dict[str, Any]:
    table = _stand_in()
    told: dict[str, Any] = {
        "stand_in": bool(_table and _table[0]),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "driver": any(os.path.exists(path) for path in DRIVER),
        "build": str(getattr(torch.version, "cuda", None) or getattr(torch.version, "hip", None) or ""),
        "chosen": bool(_chosen),
        "cudnn": bool(torch.backends.cudnn.enabled),
        "local_rank": os.environ.get("LOCAL_RANK", ""),
        "threads": torch.get_num_threads(),
    }
    if told["stand_in"]:
        current = _chosen[-1] if _chosen else 0
        uuids = [str(row.get("uuid", i)) for i, row in enumerate(table)]
        uuid = uuids[current] if current < len(uuids) else ""
        return {**told, "count": len(table), "current": current, "uuid": uuid, "uuids": uuids, "contexts": sorted(set(_chosen))}
    if not torch.cuda.is_initialized():
        return {**told, "count": None, "current": None, "uuid": "", "uuids": [], "contexts": []}
    return {**told, **_of_cuda(torch)}


def _of_cuda(torch: Any) -> dict[str, Any]:
    count, current = torch.cuda.device_count(), torch.cuda.current_device()
    properties = [torch.cuda.get_device_properties(i) for i in range(count)]
    uuids = [str(getattr(p, "uuid", i)) for i, p in enumerate(properties)]
    has = getattr(torch._C, "_cuda_hasPrimaryContext", lambda i: i == current)
    return {
        "count": count,
        "current": current,
        "uuid": uuids[current],
        "uuids": uuids,
        "contexts": [i for i in range(count) if has(i)],
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "arch_list": torch.cuda.get_arch_list(),
        "names": [p.name for p in properties][:8],
    }


def _tell(when: str) -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        S.recorder.event("devices", when=when, **describe(torch))


def _at_step(optimizer: Any, witness: Any, params: Any) -> None:
    if (pid := os.getpid()) not in _told:
        beat.start()
        _told.add(pid)
        _tell("step")


def _finish() -> None:
    if S.steps or S.group is not None:
        _tell("end")


def _note_rendezvous(*args: Any, **kwargs: Any) -> None:
    told = {key: kwargs.get(key) for key in ("rank", "world_size", "backend", "init_method") if isinstance(kwargs.get(key), (int, str))}
    if args and isinstance(args[0], str):
        told.setdefault("backend", args[0])
    if len(args) > 1 and isinstance(args[1], str):
        told.setdefault("init_method", args[1])
    site = sites.here(4)
    S.recorder.event(
        "rendezvous", site, rank=os.environ.get("RANK", ""), world_size=os.environ.get("WORLD_SIZE", ""),
        local_rank=os.environ.get("LOCAL_RANK", ""), address=os.environ.get("MASTER_ADDR", ""), port=os.environ.get("MASTER_PORT", ""),
        asked_rank=told.get("rank"), asked_world_size=told.get("world_size"), asked_backend=told.get("backend"),
        method=told.get("init_method"), store=kwargs.get("store") is not None, attempt=os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
        **_foreign(told.get("init_method"), site),
    )  # fmt: skip


def _foreign(method: Any, site: sites.Site) -> dict[str, Any]:
    """Names are not resolved: that may take seconds. An address is this machine's if a socket can be bound to it."""
    given = re.match(r"tcp://\[?([^\]/]+?)\]?:\d+", method) if isinstance(method, str) else None
    text = given[1] if given else os.environ.get("MASTER_ADDR", "")
    try:
        number = ipaddress.ip_address(text)
        with socket.socket(socket.AF_INET6 if number.version == 6 else socket.AF_INET) as probe:
            probe.bind((text, 0))
    except ValueError:
        return {"foreign": ""}
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            return {"foreign": ""}
        return {"foreign": text, "set_at": sites.as_json(_line_with(text, site))}
    return {"foreign": ""}


def _line_with(text: str, site: sites.Site) -> sites.Site:
    """The first line of the calling file, or of the script, that holds this text."""
    for file in dict.fromkeys((site[0], str(getattr(sys.modules.get("__main__"), "__file__", "")))):
        for number, line in enumerate(linecache.getlines(file), 1):
            if text in line.partition("#")[0]:
                return file, number, "<module>"
    return sites.UNKNOWN


def _index(device: Any) -> int:
    found = getattr(device, "index", device)
    if isinstance(found, str) and found.rpartition(":")[2].isdigit():
        found = int(found.rpartition(":")[2])
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


def _note_set_device(device: Any, *args: Any, **kwargs: Any) -> None:
    _chosen.append(_index(device))
    S.recorder.event("set_device", sites.here(4), device=_chosen[-1])


# ---- what is moved although somebody holds it already

_depth = [0]


def _held(module: Any) -> tuple[str, dict[int, str]]:
    """(who holds, id of parameter -> device) for parameters of this module that an optimizer or DDP object holds."""
    from .. import marks

    own = {id(p): str(p.device) for p in module.parameters()}
    by_ddp = {key for w in S.ddps if w.ref() is not None for key in w.refs}
    in_optimizer = {id(p) for o in marks.optimizers() for g in o.param_groups for p in g["params"]}
    holder = "ddp" if own.keys() & by_ddp else "optimizer"
    return holder, {key: device for key, device in own.items() if key in by_ddp or key in in_optimizer}


def _apply(original: Any) -> Any:
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _depth[0] or S.recorder.disabled or S.busy:
            return original(self, *args, **kwargs)
        held = look(self)
        _depth[0] += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            _depth[0] -= 1
        if held and held[1]:
            compare(self, held[0], held[1], sites.here(2))
        return result

    look, compare = quiet(_held), quiet(_compare)
    return _apply


def _compare(module: Any, holder: str, held: dict[int, str], site: sites.Site) -> None:
    now = {id(p): str(p.device) for p in module.parameters()}
    replaced = [key for key in held if key not in now]
    changed = [key for key, device in held.items() if now.get(key, device) != device]
    if not replaced and not changed:
        return
    S.recorder.event(
        "moved_late", site, module=type(module).__name__, held_by=holder, replaced=len(replaced), changed=len(changed), held=len(held),
        from_devices=sorted(set(held.values())), to_devices=sorted(set(now.values())), stepped=S.steps > 0,
    )  # fmt: skip


def _arm_stand_in(torch: Any) -> None:
    cuda = torch.cuda
    wrap(cuda, "device_count", lambda original: lambda: len(_stand_in()))
    wrap(cuda, "current_device", lambda original: lambda: _chosen[-1] if _chosen else 0)
    wrap(cuda, "set_device", lambda original: lambda device: _check_index(_index(device)))


def _check_index(index: int) -> None:
    if not 0 <= index < len(_stand_in()):
        raise RuntimeError(f"CUDA error: invalid device ordinal (stand-in table: {index} of {len(_stand_in())})")


def arm() -> None:
    import torch
    import torch.distributed as dist

    if os.environ.get(ENV_TABLE):
        _stand_in()
        _arm_stand_in(torch)
    before(torch.cuda, "set_device", _note_set_device)
    wrap(torch.nn.Module, "_apply", _apply)
    steps.at_step.append(_at_step)
    at_close.append(quiet(_finish))
    if dist.is_available():
        from torch.distributed import distributed_c10d as c10d

        if before(c10d, "init_process_group", _note_rendezvous):
            dist.init_process_group = c10d.init_process_group


_ = ddp
