"""The exact text of a batch script: one pure function, for the submission, for `--dry-run` and for `harness sbatch`.

What it takes from submitit 1.5 is the command by which a task finds its pickle, `python -m submitit.core._submit FOLDER`, under the variable
SUBMITIT_EXECUTOR; tests/unit/test_slurm_submitit.py guards that. Lines come sorted, so that two texts compare.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Batch:
    """A batch script: sbatch's long options (value "": a bare flag), shell lines before the command, the command."""

    options: Mapping[str, str]
    command: str
    setup: Sequence[str] = ()
    comments: Sequence[str] = field(default_factory=tuple)


def batch_text(batch: Batch) -> str:
    lines = ["#!/bin/bash", *(f"# {_one_line(comment)}" for comment in batch.comments)]
    lines += [f"#SBATCH {flag(name, value)}" for name, value in sorted(batch.options.items())]
    if batch.setup:
        lines += ["", "# setup", *batch.setup]
    return "\n".join([*lines, "", "# command", batch.command, ""])


def flag(name: str, value: str) -> str:
    """One option as sbatch reads it from a script: shell quotes, one line."""
    return f"--{name}={shlex.quote(_one_line(value))}" if value else f"--{name}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def job_name(name: str) -> str:
    """A script's name as a job's: squeue shows it, and some sites' scripts parse that."""
    kept = re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("_")
    return f"harness-{kept[:40] or 'run'}"


def submitit_command(python: str, folder: str, srun: Sequence[str]) -> str:
    """Each task of the job step loads the pickle of its job and calls it: a command of ours, nothing else."""
    step = shlex.join(["srun", "--unbuffered", *srun])
    return f"export SUBMITIT_EXECUTOR=slurm\n{step} {submitit_python(python)} -u -m submitit.core._submit {shlex.quote(folder)}"


def submitit_python(python: str) -> str:
    """-P: nothing in the folder of the job hides a module of submitit."""
    return f"{shlex.quote(python)} -P"
