"""One process in the foreground that keeps the terminal, for a debugger: what torchrun sets for one process, without an agent."""

from __future__ import annotations

from pathlib import Path

from harness.launch.command import Command, for_the_shim, python_of, rank_environment, script_path, shim
from harness.model import Plan
from harness.probe import protocol

# MASTER_PORT 0: the shim gives a lone rank a free port of its own. No TORCHELASTIC_USE_AGENT_STORE: there is no agent that holds a store.
ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
    "ROLE_RANK": "0", "ROLE_NAME": "default", "ROLE_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
}  # fmt: skip


def command(plan: Plan, run_dir: Path) -> Command:
    if plan.world_size != 1:
        raise ValueError(f"launcher inline runs one process, not {plan.world_size}")
    argv = [*shim(plan, run_dir, "rank_shim.py", "--foreground"), python_of(plan), "-u", script_path(plan), *plan.script_args]
    env = {**ALONE, "TORCHELASTIC_RUN_ID": plan.run_id, protocol.ENV_RUN_ID: plan.run_id}
    return Command(tuple(argv), {**env, **for_the_shim(rank_environment(plan, run_dir))}, plan.cwd, foreground=True)


LAUNCHER = command
