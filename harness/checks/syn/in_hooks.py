"""Parameters of a wrapped model that are updated inside of the backward, in hooks on themselves: with the rank's own gradient, DDP has not averaged it."""

from __future__ import annotations

from harness.model import Where
from harness.record import Event, Run, number, where_of


def updates(run: Run) -> list[Event]:
    """Those that DDP should have averaged before; none where the script averages in its hooks by itself."""
    shared = {(rank, e["index"]) for rank, e in run.events("wrap") if number(e["group_size"]) > 1}
    told = [e for rank, e in run.events("hook_update") if (rank, e["index"]) in shared]
    return [e for e in told if not e["no_sync"]] if not any(e["collectives"] for e in told) else []


def call_of(run: Run, event: Event) -> Where | None:
    """The call, in the function that wraps the model, by which a helper came to register its hooks: the helper is right in itself."""
    trainers = {(w.file, w.function) for _, e in run.events("wrap") if (w := e.where) is not None}
    callers = [w for site in event["callers"] or () if (w := where_of(site)) is not None]
    return next((w for w in callers if (w.file, w.function) in trainers), None)
