"""Whether the controller of a run folder still lives."""

from __future__ import annotations

from typing import Any


def still_running(folder: Any) -> bool:
    from harness import procfs, replay

    if folder.status in ("running", "detached") and folder.plan.launcher == "slurm":
        return not replay.all_told(folder)  # the job goes on without a controller; what became of it, harness attach finds out
    who = folder.report.get("controller")
    if folder.status != "running" or not isinstance(who, dict) or not isinstance(who.get("pid"), int):
        return False
    return procfs.start_ticks(who["pid"]) == who.get("start_ticks") != 0
