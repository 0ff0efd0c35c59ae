"""CKP108 map-location-missing: a checkpoint is loaded onto the device of the rank that saved it.

What it does
    Reads the device tags of the storages in a loaded file and compares them with the device that this rank works on, where `map_location`
    was not given. On a machine without that device torch refuses the file; that is named too.

Why it is bad
    Every rank loads onto GPU 0: the memory of all copies piles up there, and each rank keeps a context on a device that is not its own.

Wrong
    state = torch.load("model.pt")

Right
    state = torch.load("model.pt", map_location="cpu")        # or f"cuda:{local_rank}"

Known limits
    The tags of the file are compared with the device of the process; on a machine without GPUs that is the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number

REFUSED = "Attempting to deserialize object on"


class MapLocationMissing(Check):
    code = "CKP108"
    name = "map-location-missing"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU122", "HNG*", "DEV102")

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [load for load in files.loads(run) if load.end is not None]
        if not loads:
            raise NotApplicable("nothing is loaded with torch.load")
        foreign = [load for load in loads if load.end is not None and _foreign(load.end, _own_devices(run.ranks[load.rank], load.end))]
        if not foreign:
            if not any(_tags(load.end) - {"cpu"} for load in loads if load.end is not None):
                raise NotApplicable("every loaded tensor was saved from the CPU")
            return
        first = foreign[0]
        end = first.end
        assert end is not None
        own = _own_devices(run.ranks[first.rank], end)
        tags = sorted(_tags(end) - {"cpu"} - own) or ["cuda"]
        refused = REFUSED in first.error
        yield self.finding(
            f"{files.name(first.path) or 'a buffer'} was saved from {', '.join(tags)} and is loaded without map_location"
            + ("" if refused else f" by a rank that works on {', '.join(sorted(own))}"),
            where=first.begin.where,
            ranks=sorted({load.rank for load in foreign}),
            notes=[
                "this process has no such device, torch refuses the file"
                if refused
                else f"{_count(end, own)} storages went to a device that is not this rank's"
            ],
            help="pass `map_location='cpu'`, or this rank's own device",
            severity=None if refused or run.world_size > 1 else Severity.WARNING,
        )


def _tags(event: Event) -> set[str]:
    found: Any = event["locations"]
    return {str(k) for k in found} if isinstance(found, dict) else set()


def _own_devices(recording: Recording | None, event: Event) -> set[str]:
    """Where this rank's trained parameters lie; the current device of the process where nothing is trained."""
    found = {str(d) for e in (recording.of("params") if recording is not None else []) for d in e["devices"] or []}
    return found or {str(event["device"] or "cpu")}


def _foreign(event: Event, own: set[str]) -> bool:
    if event["map_location"] is not None:
        return False
    if event["error"]:
        return REFUSED in str(event["error"])
    return any(tag.startswith(("cuda:", "xpu:")) and tag not in own for tag in _tags(event)) and own != {"cpu"}


def _count(event: Event, own: set[str]) -> int:
    found: Any = event["locations"]
    return sum(number(v) for k, v in found.items() if k != "cpu" and k not in own) if isinstance(found, dict) else 0
