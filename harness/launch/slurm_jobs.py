"""Runs become Slurm jobs: which of them share one array, the request to submitit, and which job carries a run.

submitit is imported only in a process of its own (slurm_submit.py); its pickles are never read.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import attempt, rundir
from harness.launch import slurm_layout
from harness.launch.command import LAUNCH_DIR, python_of
from harness.model import Plan

JOB_FILE = "job.json"  # in SLURM_DIR: which job carries the run
SUBMIT_LIMIT_S = 120.0


def grouped(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Plans that can be elements of one array, in the order in which they were given."""
    groups: dict[tuple[object, ...], list[Plan]] = {}
    for plan in plans:
        groups.setdefault(_shape(plan), []).append(plan)
    return list(groups.values())


def _shape(plan: Plan) -> tuple[object, ...]:
    """What two runs must have in common to be elements of one array."""
    slurm = slurm_layout.settings_of(plan)
    wanted = {**slurm_layout.options(plan), "job-name": "", "time": slurm.options.get("time", "")}
    return slurm.ranks, slurm.gpus, slurm.setup, tuple(sorted(wanted.items())), plan.python


def submit(plans: Sequence[Plan], folders: Sequence[Path], with_reference: bool) -> list[str] | str:
    """Job ids, one a run (several make an array), or what Slurm said against it. Each run's folder remembers its job."""
    folder = slurm_layout.submission_dir(folders[0])
    folder.mkdir(mode=0o700, exist_ok=True)
    for run_dir in folders:
        attempt.make(run_dir, 0)
        attempt.write_note(run_dir / attempt.CONTROL, "")
        (run_dir / attempt.SLURM_DIR).mkdir(mode=0o700, exist_ok=True)
    text = slurm_layout.text(plans, folder, with_reference)
    (folder / "submission.sh").write_text(text, "utf-8")
    request = {
        "folder": str(folder),
        "text": text,
        "commands": [slurm_layout.node_command(plan, run_dir) for plan, run_dir in zip(plans, folders, strict=True)],
        "notes": [str(run_dir.absolute() / attempt.SLURM_DIR / JOB_FILE) for run_dir in folders],
        "unset": [slurm_layout.variable_of(name) for name in slurm_layout.settings_of(plans[0]).explicit],
    }
    return ask_submitit(python_of(plans[0]), request)


def ask_submitit(python: str, request: dict[str, Any]) -> list[str] | str:
    boot = [python, "-P", str(LAUNCH_DIR / "slurm_submit.py")]
    env = {**os.environ, "PYTHONUTF8": "1"}
    try:
        done = subprocess.run(
            boot, input=json.dumps(request), env=env, capture_output=True, text=True, encoding="utf-8", errors="replace",
            timeout=SUBMIT_LIMIT_S, start_new_session=True,
        )  # fmt: skip
        answer = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer within {SUBMIT_LIMIT_S:.0f} s"
    except OSError as error:
        return f"submitit could not be run: {error}"
    except (ValueError, IndexError):
        return f"submitit could not be run: {done.stderr[-1000:]}"
    return [str(job) for job in answer["jobs"]] if "jobs" in answer else str(answer["error"])


def noted(run_dir: Path) -> tuple[str, str]:
    """(id, folder of submission) of the job that carries the run in this folder; "" where none was submitted."""
    path = run_dir / attempt.SLURM_DIR / JOB_FILE
    raw = rundir.read_json(path) if path.is_file() else {}
    job_id, folder = (raw.get("job_id"), raw.get("folder", "")) if isinstance(raw, dict) else (None, "")
    return (job_id, str(folder)) if isinstance(job_id, str) and job_id.replace("_", "").isdecimal() else ("", "")


def job_of(run_dir: Path) -> str:
    return noted(run_dir)[0]
