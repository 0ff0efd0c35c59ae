"""What the ranks told about their devices, by host."""

from __future__ import annotations

from dataclasses import dataclass

from harness.checks.base import NotApplicable
from harness.record import Event, Recording, Run


@dataclass(frozen=True)
class Used:
    """The device of one rank."""

    rank: int
    host: str
    uuid: str
    count: int  # devices that this process can see
    current: int
    contexts: tuple[int, ...]
    uuids: tuple[str, ...]
    stand_in: bool
    event: Event
    recording: Recording


def used(run: Run) -> list[Used]:
    """One entry for each rank that has a device; NotApplicable where none has."""
    found = []
    for rank, recording in enumerate(run.ranks):
        events = [e for e in recording.of("devices") if e["uuid"]] if recording is not None else []
        if recording is None or not events:
            continue
        event = events[-1]
        contexts = event["contexts"] if isinstance(event["contexts"], list) else []
        uuids = event["uuids"] if isinstance(event["uuids"], list) else []
        found.append(
            Used(
                rank,
                str(recording.start.get("host") or ""),
                str(event["uuid"]),
                event["count"] if isinstance(event["count"], int) else len(uuids),
                event["current"] if isinstance(event["current"], int) else 0,
                tuple(c for c in contexts if isinstance(c, int)),
                tuple(str(u) for u in uuids),
                bool(event["stand_in"]),
                event,
                recording,
            )
        )
    if not found:
        raise NotApplicable("no rank used a GPU")
    return found


def num_gpus(group: list[Used]) -> int:
    """Different devices that the ranks of one host see together."""
    return len({uuid for one in group for uuid in one.uuids})


def by_host(found: list[Used]) -> list[list[Used]]:
    groups: dict[str, list[Used]] = {}
    for one in found:
        groups.setdefault(one.host, []).append(one)
    return list(groups.values())


def note(group: list[Used]) -> list[str]:
    """Said in every finding that rests on a stand-in."""
    return ["the device table was a stand-in: this machine's own devices were not looked at"] if any(one.stand_in for one in group) else []


def chosen_at(one: Used) -> Event | None:
    """The statement that chose the device."""
    calls = one.recording.of("set_device")
    return calls[-1] if calls else None
