"""Slurm's tools, where this host has them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable

from harness.doctor.line import OK, WARNING, Host, Line

WHY = "--launcher slurm submits with sbatch, starts ranks with srun and asks the controller for the job's state"
TOOLS = ("sinfo", "sbatch", "srun", "scancel", "sacct")
PATIENCE_S = 10.0


def look(host: Host) -> Iterable[Line]:
    path = host.environ.get("PATH", "")
    there = [tool for tool in TOOLS if shutil.which(tool, path=path)]
    if not there:
        return [Line("slurm", OK, "no Slurm here: --launcher slurm is not available", WHY)]
    missing = [tool for tool in TOOLS if tool not in there]
    if missing and missing != ["sacct"]:
        return [Line("slurm", WARNING, f"{', '.join(missing)} not found beside {', '.join(there)}", WHY, "load the site's slurm module")]
    return [_answers(host)]


def _answers(host: Host) -> Line:
    try:
        done = subprocess.run(["sinfo", "--noheader", "--format=%P %D %t"], env=dict(host.environ), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Line("slurm", WARNING, f"sinfo gave no answer in {PATIENCE_S:.0f} s", WHY, "ask whether slurmctld runs (scontrol ping)")
    if done.returncode:
        return Line("slurm", WARNING, f"sinfo: {done.stderr.strip()[:200]}", WHY, "ask whether slurmctld runs (scontrol ping)")
    rows = [line.split() for line in done.stdout.splitlines()]
    usable = sum(int(row[1]) for row in rows if len(row) == 3 and row[1].isdigit() and row[2].rstrip("*~#") in ("idle", "mix", "alloc"))
    return Line("slurm", OK if usable else WARNING, f"{usable} usable node entries in {len(rows)} rows of sinfo", WHY, "" if usable else "look at sinfo")
