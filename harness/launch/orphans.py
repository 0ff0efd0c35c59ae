"""The last resort of a controller whose supervisor was killed: ends what bears the run's mark, and nothing else."""

from __future__ import annotations

import signal
import time

from harness.launch import proctable

PATIENCE_S, KILLED_S = 1.0, 3.0


def end_marked(run_id: str) -> tuple[str, ...]:
    """Gives the processes of the run a moment, kills them, and names those that are left."""
    begun = time.monotonic()
    while members := proctable.marked(proctable.snapshot(), run_id):
        age_s = time.monotonic() - begun
        if age_s > PATIENCE_S + KILLED_S:
            return tuple(f"process {process.pid} ({process.name}) outlives SIGKILL" for process in members)
        if age_s > PATIENCE_S:
            for process in members:
                proctable.send(process, signal.SIGKILL)
        time.sleep(0.02)
    return ()
