"""What a launcher is: a pure function from a plan to a command. The supervisor executes commands and knows no launcher."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.launch.rank_shim import ENV_FIFO, RANK_PREFIX
from harness.model import Plan
from harness.probe import protocol

AGENT_LOG = "agent.log"  # in LOG_DIR: what the launcher itself said
HARNESS_ROOT = Path(__file__).resolve().parents[2]
LAUNCH_DIR = Path(__file__).resolve().parent
PROBE_DIR = HARNESS_ROOT / "harness" / "probe"

# A job that ran in this shell before may have left these behind; the agent sets its own, an inline rank must not inherit them.
INHERITED = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "PYTHON_EXEC",
    protocol.ENV_RUN_DIR, protocol.ENV_RUN_ID, protocol.ENV_PROBE_DIR, protocol.ENV_SHADOWED, protocol.ENV_EXPECT, protocol.ENV_NODE, protocol.ENV_INTERFACE,
    ENV_FIFO,
)  # fmt: skip
INHERITED_PREFIXES = ("PET_", RANK_PREFIX)  # torchrun reads an option from PET_<OPTION> where its command line has none


@dataclass(frozen=True)
class Warmth:
    """What preloaded servers a command needs: one a local rank, each with `preload` imported under `env`."""

    count: int
    preload: tuple[str, ...]
    folder: str  # the script's: first on a rank's path, so nothing in it may bear the name of a preloaded module
    python: str
    env: Mapping[str, str]


@dataclass(frozen=True)
class Command:
    """One process to start, by exact argv and added environment; everything else follows from it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    foreground: bool = False  # keeps the terminal of the controller as stdin, stdout and stderr
    warmth: Warmth | None = None
    fallback: Command | None = None  # used, and said, where servers cannot be had
    note: str = ""  # why this is not the launcher that was asked for


@dataclass(frozen=True)
class Place:
    """Where an agent stands in a job: alone on this machine, or one of several that meet at `endpoint`."""

    endpoint: str = "127.0.0.1:0"
    local_addr: str = "127.0.0.1"  # under which the other nodes reach this one
    is_host: bool | None = None  # whether this agent holds the rendezvous; None: torchrun finds out


ALONE = Place()


def python_of(plan: Plan) -> str:
    return plan.python or sys.executable


def rank_environment(plan: Plan, run_dir: Path, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a rank gets on top of what it inherits: the marks of the run and the probe in front of PYTHONPATH."""
    inherited = os.environ if inherited is None else inherited
    env = dict(plan.env)
    path = [str(PROBE_DIR / "inject"), *filter(None, [env.get("PYTHONPATH", inherited.get("PYTHONPATH", ""))])]
    env["PYTHONPATH"] = os.pathsep.join(path)
    if plan.nodes == 1 and "GLOO_SOCKET_IFNAME" not in inherited:
        env[protocol.ENV_INTERFACE] = "lo"
    env[protocol.ENV_RUN_DIR] = str(run_dir.absolute())
    env[protocol.ENV_RUN_ID] = plan.run_id
    env[protocol.ENV_PROBE_DIR] = str(PROBE_DIR)
    env[protocol.ENV_EXPECT] = json.dumps({"nproc": plan.nproc, "nodes": plan.nodes, "script": script_path(plan)})
    return env


def agent_environment(plan: Plan, run_dir: Path) -> dict[str, str]:
    """The agent is ours but not a rank: it bears the run id and hands the ranks' environment on to the shim."""
    env = {name: value for name, value in plan.env.items() if name != "PYTHONPATH"}
    return {**env, protocol.ENV_RUN_ID: plan.run_id, **for_the_shim(rank_environment(plan, run_dir))}


def for_the_shim(env: Mapping[str, str]) -> dict[str, str]:
    """Under the names from which the shim takes them."""
    return {RANK_PREFIX + name: value for name, value in env.items()}


def script_path(plan: Plan) -> str:
    """The script as the user typed it: argv[0] of the rank, as under torchrun."""
    return plan.scenario.path


def shim(plan: Plan, run_dir: Path, file: str, *options: str) -> list[str]:
    """The start of a rank's command: a tiny interpreter without site-packages (about 15 ms, 9 MB) that keeps the exit code."""
    return [python_of(plan), "-I", "-S", str(LAUNCH_DIR / file), str(run_dir.absolute()), *options, "--"]
