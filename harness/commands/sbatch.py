"""`harness sbatch SCRIPT`: a batch script to copy, for a check inside a job or for the training itself."""

from __future__ import annotations

from harness.commands._options import add_settings

TYPE_CHECKING = False  # see _options
if TYPE_CHECKING:
    import argparse
    from typing import Any

KEYS = (
    "nproc", "nodes", "device", "backend", "timeout_s", "hang_timeout_s", "memory_budget", "seed", "data", "select", "ignore", "fail_on", "slurm",
    "site", "no_reference",
)  # fmt: skip


def add_parser(sub: Any) -> None:
    parser = sub.add_parser(
        "sbatch",
        help="print a batch script for Slurm",
        description="Prints a batch script: as it stands it runs harness inside the job, and the job's output is the report. "
        "With --bare it starts the script by srun and torchrun alone, as a training would be.",
        epilog="example: harness sbatch ./train.py --nodes 2 -n 4 --slurm partition=gpu -- --lr 0.1 > job.sh; sbatch job.sh",
        allow_abbrev=False,
    )
    parser.add_argument("script", metavar="NAME|PATH", help="a scenario or a script")
    parser.add_argument("--bare", action="store_true", help="srun and torchrun alone, nothing of harness in it")
    add_settings(parser, KEYS)


def run(args: argparse.Namespace) -> int:
    import os
    from pathlib import Path

    from harness import catalog
    from harness.commands._run import job_of_script
    from harness.launch import slurm_layout

    cwd = Path.cwd()
    args.launcher = "slurm"
    scenario = catalog.find([args.script], cwd)[0]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_JOB")}
    job, _ = job_of_script(scenario, args, args.script_args or [], cwd, several=False, environ=environ)
    if args.bare:
        print(slurm_layout.bare_text(job.plan), end="")
    else:
        print(slurm_layout.harness_text(job.plan, words_inside(args, job.plan), job.reference is not None), end="")
    return 0


def words_inside(args: argparse.Namespace, plan: Any) -> list[str]:
    """What `harness run` is told inside the job: the same, without what only the submission needs."""
    from harness.commands._options import REPEATABLE, SETTING_FLAGS

    words = [args.script, "--launcher", "slurm", "--nodes", str(plan.nodes), "-n", str(plan.nproc)]
    for key in KEYS:
        value = getattr(args, key, None)
        if key in ("nproc", "nodes", "slurm", "site") or value is None:
            continue
        flag = SETTING_FLAGS[key][0][-1]
        if SETTING_FLAGS[key][1] is None:
            words.append(flag)
        else:
            for one in value if key in REPEATABLE else [value]:
                words += [flag, str(one)]
    if plan.slurm.ranks != "agent":
        words += ["--slurm", f"ranks={plan.slurm.ranks}"]
    return [*words, *(["--", *args.script_args] if args.script_args else [])]
