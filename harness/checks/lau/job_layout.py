"""LAU135 job-layout: Slurm laid the job out otherwise than the run was planned.

What it does
    Compares tasks and nodes as each task found them in its environment with what was planned. An error: ranks are missing, doubled, or all on one
    node.

Why it is bad
    A variable SLURM_* or SBATCH_* left in the shell, a raw flag, or a site's plugin changes the layout: each task may believe to be alone in a
    world of one, or a node gets all ranks and another none.

Wrong
    srun -N4 -n8 python train.py              # packed 5,1,1,1 on the nodes

Right
    srun -N4 --ntasks-per-node=2 python train.py

Known limits
    Looks at counts, not at which CPUs the tasks got.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import slurm_job
from harness.model import Finding, Severity
from harness.record import Run


class JobLayout(Check):
    code = "LAU135"
    name = "job-layout"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU110", "LAU114", "LAU121", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        slurm_job.scheduler(run)
        if not run.nodes:
            raise NotApplicable("no task of the job reported")
        slurm = run.plan.slurm
        tasks = run.plan.world_size if slurm is not None and slurm.ranks == "task" else run.plan.nodes
        wrong = [told for told in run.nodes if (_number(told, "ntasks"), _number(told, "nnodes")) != (tasks, run.plan.nodes)]
        if wrong:
            first = wrong[0]
            yield self.finding(
                f"Slurm started {_number(first, 'ntasks')} tasks on {_number(first, 'nnodes')} nodes, planned were {tasks} on {run.plan.nodes}",
                notes=[f"tasks per node: {_facts(first).get('tasks_per_node', '')}", f"{len(run.nodes)} of {tasks} tasks reported"],
                help="look for SLURM_* and SBATCH_* in the environment (env | grep -E '^S(LURM|BATCH)_'), and leave node and task counts to "
                "--nodes and -n",
            )
        elif len({str(told.get("node")) for told in run.nodes}) < min(run.plan.nodes, len(run.nodes)) and len(run.nodes) == tasks:
            names = sorted({str(told.get("node")) for told in run.nodes})
            yield self.finding(
                f"{tasks} tasks of {run.plan.nodes} nodes ran on {', '.join(names)} alone",
                notes=[f"tasks per node: {_facts(run.nodes[0]).get('tasks_per_node', '')}"],
                help="leave --distribution and SLURM_DISTRIBUTION out",
            )


def _facts(told: object) -> dict[str, object]:
    facts = told.get("slurm") if isinstance(told, dict) else None
    return facts if isinstance(facts, dict) else {}


def _number(told: object, name: str) -> int:
    text = str(_facts(told).get(name, ""))
    return int(text) if text.isdecimal() else 0
