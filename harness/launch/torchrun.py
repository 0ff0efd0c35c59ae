"""The real torchrun command in its own process, one fresh interpreter a rank.

Each rank is started by `rank_shim.py`: it writes both streams of the rank into one log as they come, and reports the rank's own pid and
exit code, which the agent would reap and forget.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.launch.command import ALONE, Command, Place, agent_environment, python_of, script_path, shim
from harness.model import Plan
from harness.probe import protocol


def command(plan: Plan, run_dir: Path, place: Place = ALONE) -> Command:
    rank = [*shim(plan, run_dir, "rank_shim.py"), python_of(plan), "-u", script_path(plan), *plan.script_args]
    argv = [python_of(plan), "-P", "-m", "torch.distributed.run", *agent_arguments(plan, run_dir, place), *verbatim(rank)]
    return Command(tuple(argv), agent_environment(plan, run_dir), plan.cwd)


LAUNCHER = command


def agent_arguments(plan: Plan, run_dir: Path, place: Place = ALONE) -> list[str]:
    """torchrun's own options: alone by loopback and a port that the system chooses; no restart, nothing left in /tmp."""
    host = [] if place.is_host is None else ["--rdzv-conf", f"is_host={int(place.is_host)}"]
    return [
        "--nnodes", str(plan.nodes),
        "--nproc-per-node", str(plan.nproc),
        "--max-restarts", "0",
        "--rdzv-backend", "c10d",
        "--rdzv-endpoint", place.endpoint,
        "--rdzv-id", plan.run_id,
        *host,
        "--local-addr", place.local_addr,
        "--log-dir", str(run_dir.absolute() / protocol.LOG_DIR / "torchelastic"),
        "--no-python",
    ]  # fmt: skip


def verbatim(argv: Sequence[str]) -> list[str]:
    """The agent substitutes `$name` in the rank's arguments; what the user typed has to arrive as it is."""
    return [argument.replace("$", "$$") for argument in argv]
