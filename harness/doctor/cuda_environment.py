"""CUDA_VISIBLE_DEVICES, where it is set."""

from __future__ import annotations

from collections.abc import Iterable

from harness.doctor.line import OK, WARNING, Host, Line

QUICK = True
WHY = "CUDA silently ignores everything behind the first entry that is wrong: ranks then share fewer GPUs than were meant"


def look(host: Host) -> Iterable[Line]:
    raw = host.environ.get("CUDA_VISIBLE_DEVICES")
    if raw is None:
        return []
    entries = [entry.strip() for entry in raw.split(",")]
    twice = sorted({entry for entry in entries if entry and entries.count(entry) > 1})
    if twice:
        return [Line("visible devices", WARNING, f"CUDA_VISIBLE_DEVICES={raw} names {', '.join(twice)} twice", WHY, "name each GPU once")]
    if "-1" in entries[1:] or "" in entries[1:]:
        return [Line("visible devices", WARNING, f"CUDA_VISIBLE_DEVICES={raw} ends at its first wrong entry", WHY, "leave the wrong entry out")]
    return [Line("visible devices", OK, f"CUDA_VISIBLE_DEVICES={raw}" if raw else "CUDA_VISIBLE_DEVICES is empty: all GPUs are hidden", WHY)]
