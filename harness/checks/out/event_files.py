"""TensorBoard event files that the ranks write: which rank, which folder."""

from __future__ import annotations

from harness.record import Event, Run

MARK = "events.out.tfevents."


def writers(run: Run) -> dict[str, list[tuple[int, Event]]]:
    """Folder -> (rank, first open of each of its event files)."""
    found: dict[str, list[tuple[int, Event]]] = {}
    seen: set[tuple[int, str]] = set()
    for rank, event in run.events("open"):
        path = str(event["path"] or "")
        folder, _, name = path.rpartition("/")
        if MARK in name and event["mode"] != "r" and (rank, path) not in seen:
            seen.add((rank, path))
            found.setdefault(folder, []).append((rank, event))
    return found
