"""From a plan to what Slurm is asked for: pure functions, so that a dry run shows what a submission sends."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness import attempt
from harness.launch.command import LAUNCH_DIR, python_of
from harness.launch.slurm_text import Batch, batch_text, job_name, submitit_command
from harness.model import Plan, Slurm

START_ALLOWANCE_S = 300.0  # importing torch from a loaded file server, before our own wall limit begins to count
BATCH_LOG = "job-%j.log"  # relative to the folder of the submission: no path of the user's has to be quoted for sbatch
ARRAY_LOG = "job-%A_%a.log"


def settings_of(plan: Plan) -> Slurm:
    return plan.slurm or Slurm()


def num_agents(plan: Plan) -> int:
    """Slurm tasks of the run, each with a supervisor of ours."""
    return plan.world_size if settings_of(plan).ranks == "task" else plan.nodes


def tasks_per_node(plan: Plan) -> int:
    return plan.nproc if settings_of(plan).ranks == "task" else 1


def time_minutes(plan: Plan, with_reference: bool) -> int:
    """Slurm's limit lies behind our own: the run ends in order, and Slurm only where that failed."""
    runs = 2 if with_reference else 1
    return math.ceil((runs * plan.timeout_s + START_ALLOWANCE_S) / 60)


def options(plan: Plan, with_reference: bool = False) -> dict[str, str]:
    """What sbatch is asked for; what the user says wins."""
    slurm = settings_of(plan)
    ours = {
        "job-name": job_name(plan.scenario.name),
        "nodes": str(plan.nodes),
        "ntasks-per-node": str(tasks_per_node(plan)),
        "cpus-per-task": str(cpus_per_task(plan)),
        "time": str(time_minutes(plan, with_reference)),
        "output": BATCH_LOG,
        "open-mode": "append",  # a requeued job keeps what its first attempt said
        **_gpus(plan),
    }
    return {**ours, **slurm.options}


def cpus_per_task(plan: Plan) -> int:
    slurm = settings_of(plan)
    return slurm.cpus_per_rank * (1 if slurm.ranks == "task" else plan.nproc)


def _gpus(plan: Plan) -> dict[str, str]:
    if plan.device != "cuda" or any(name.startswith(("gpus", "gres")) for name in settings_of(plan).options):
        return {}
    one_each = settings_of(plan).ranks == "task" and settings_of(plan).gpus == "task"
    return {"gpus-per-task": "1"} if one_each else {"gpus-per-node": str(plan.nproc)}


def srun_arguments(plan: Plan) -> list[str]:
    """Given to srun itself: since 22.05 it no longer takes CPUs a task from the job, and tasks without a count a node are packed 5,1,1,1."""
    cpus = settings_of(plan).options.get("cpus-per-task", str(cpus_per_task(plan)))
    return [
        f"--nodes={plan.nodes}", f"--ntasks={num_agents(plan)}", f"--ntasks-per-node={tasks_per_node(plan)}", f"--cpus-per-task={cpus}",
        "--kill-on-bad-exit=1",
    ]  # fmt: skip


def node_command(plan: Plan, run_dir: Path) -> list[str]:
    """What each Slurm task runs: our supervisor of that node. -I: no folder and no variable of the user's decides what it is."""
    return [python_of(plan), "-I", str(LAUNCH_DIR / "slurm_node.py"), str(run_dir.absolute())]


def step_command(plan: Plan, run_dir: Path) -> list[str]:
    """Inside an allocation: the same tasks as a step of it."""
    job = settings_of(plan).allocation
    return ["srun", f"--jobid={job}", "--unbuffered", *srun_arguments(plan), *_gpu_step(plan), *node_command(plan, run_dir)]


def _gpu_step(plan: Plan) -> list[str]:
    return [f"--{name}={value}" for name, value in _gpus(plan).items()]


def submission_dir(run_dir: Path) -> Path:
    return run_dir.absolute() / attempt.SLURM_DIR


def text(plans: Sequence[Plan], folder: Path, with_reference: bool = False) -> str:
    """The batch script of one run, or of an array of them; `folder`: where it is submitted and where its pickles lie."""
    first = plans[0]
    wanted = options(first, with_reference)
    if len(plans) > 1:
        longest = max(plans, key=lambda plan: plan.timeout_s)
        own_time = {} if "time" in settings_of(first).options else {"time": str(time_minutes(longest, with_reference))}
        throttle = f"%{settings_of(first).parallel}" if settings_of(first).parallel else ""
        wanted |= {"array": f"0-{len(plans) - 1}{throttle}", "output": ARRAY_LOG, "job-name": "harness-array", **own_time}
    command = submitit_command(python_of(first), str(folder), srun_arguments(first))
    return batch_text(Batch(wanted, command, settings_of(first).setup))


def bare_text(plan: Plan) -> str:
    """A batch script of the user's own: srun and torchrun, nothing of ours in it."""
    wanted = {**options(plan), "output": f"{job_name(plan.scenario.name)}-%j.log"}
    wanted.pop("open-mode", None)
    torchrun = [
        "torchrun", f"--nnodes={plan.nodes}", f"--nproc-per-node={plan.nproc}", "--rdzv-backend=c10d",
        "--rdzv-id=$SLURM_JOB_ID", "--rdzv-endpoint=$head:$port",
    ]  # fmt: skip
    step = " ".join(["srun", *srun_arguments(plan), *torchrun, shlex.join([plan.scenario.path, *plan.script_args])])
    return batch_text(Batch(wanted, f"{_HEAD}\n{step}", settings_of(plan).setup))


_HEAD = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nport=$((20000 + SLURM_JOB_ID % 10000))'


def harness_text(plan: Plan, arguments: Sequence[str], with_reference: bool) -> str:
    """A batch script in which `harness run` finds itself inside the allocation; the job's output is the report."""
    wanted = {**options(plan, with_reference), "output": f"{job_name(plan.scenario.name)}-%j.log"}
    wanted.pop("open-mode", None)
    command = shlex.join([sys.executable, "-m", "harness", "run", *arguments])
    return batch_text(Batch(wanted, command, settings_of(plan).setup))


def overridden(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """SBATCH_* of the user that wins over a line of the script, as sbatch has it: option -> variable."""
    variables = {name: variable_of(name) for name in options(plan)}
    explicit = settings_of(plan).explicit
    return {name: variable for name, variable in variables.items() if variable in environ and name not in explicit}


def variable_of(option: str) -> str:
    """The input variable of sbatch that stands for an option."""
    special = {"mem": "SBATCH_MEM_PER_NODE", "time": "SBATCH_TIMELIMIT", "job-name": "SBATCH_JOB_NAME", "gpus": "SBATCH_GPUS", "array": "SBATCH_ARRAY_INX"}
    return special.get(option, "SBATCH_" + option.upper().replace("-", "_"))
