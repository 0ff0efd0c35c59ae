"""Parameters of a wrapped model that are updated inside of the backward, in hooks on themselves: with the rank's own gradient, DDP has not averaged it."""

from __future__ import annotations

from harness.record import Event, Run, number


def updates(run: Run) -> list[Event]:
    """Those that DDP should have averaged before; none where the script averages in its hooks by itself."""
    shared = {(rank, e["index"]) for rank, e in run.events("wrap") if number(e["group_size"]) > 1}
    told = [e for rank, e in run.events("hook_update") if (rank, e["index"]) in shared]
    return [e for e in told if not e["no_sync"]] if not any(e["collectives"] for e in told) else []
