"""torchrun's own agent with its ranks forked from preloaded servers: importing torch is paid once for `harness run A B C`, not once a rank.

The command is torchrun's, with each interpreter replaced by a thin client: it hands argv, environment, folder and output to the server of
its local rank, which forks and runs the script as `__main__` (see warm_server.py). One server a local rank, each a fresh interpreter, so
that hash salts differ as they do under torchrun. Where a preloaded interpreter cannot be what a fresh one is, torchrun takes over, and that
is said.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.launch import preload, torchrun
from harness.launch.command import ALONE, LAUNCH_DIR, Command, Place, Warmth, agent_environment, python_of, script_path, shim
from harness.launch.torchrun import agent_arguments, verbatim
from harness.model import Plan


def command(plan: Plan, run_dir: Path, place: Place = ALONE) -> Command:
    cold = torchrun.command(plan, run_dir, place)
    script = Path(plan.cwd) / script_path(plan)
    if obstacle := preload.obstacle(script):
        return replace(cold, note=obstacle)
    rank = [*shim(plan, run_dir, "warm_client.py"), python_of(plan), "-u", script_path(plan), *plan.script_args]
    agent = [python_of(plan), str(LAUNCH_DIR / "warm_agent.py"), *agent_arguments(plan, run_dir, place), *verbatim(rank)]
    warmth = Warmth(plan.nproc, preload.modules(script), str(script.resolve().parent), python_of(plan), dict(plan.env))
    argv = (*shim(plan, run_dir, "warm_client.py", "--agent"), *agent)
    return Command(argv, agent_environment(plan, run_dir), plan.cwd, warmth=warmth, fallback=cold)


LAUNCHER = command
