"""What the controller asks of the supervisor and what it is told: one JSON object a line, over the supervisor's stdin and stdout."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.launch.command import Command, Warmth
from harness.model import Plan

# to the supervisor: {"do": RUN, ...job} | {"do": STOP, "reason": ..} | {"do": CLOSE}
RUN, STOP, CLOSE = "run", "stop", "close"
# from it: {"ev": RANK, rank, local_rank, pid, ticks} | {"ev": EXIT, rank, pid, code, time_ns, by_us} | {"ev": FALLBACK, reason}
#          | {"ev": ENDING, reason, started, exits, left_behind, oom_kills, launcher_error, wall_s}; the same lines go to <run>/supervisor.jsonl
RANK, EXIT, FALLBACK, ENDING = "rank", "exit", "fallback", "ending"


@dataclass(frozen=True)
class Job:
    """One run as the supervisor sees it: a command, not a plan."""

    run_id: str
    run_dir: str
    world_size: int
    grace_s: float
    command: Command
    own_dir: str = ""  # of this node, for what the nodes of a job cannot share: the FIFO and the agent's log; "": the run folder


@dataclass
class RankState:
    """One launched rank; `code` is None while it runs."""

    rank: int
    local_rank: int
    pid: int
    ticks: int
    code: int | None = None
    time_ns: int = 0
    by_us: bool = False


@dataclass
class Account:
    """What is known of the ranks of a run so far."""

    ranks: dict[int, RankState] = field(default_factory=dict)

    def exits(self) -> list[dict[str, Any]]:
        done = [state for state in self.ranks.values() if state.code is not None]
        return [exit_event(state) for state in sorted(done, key=lambda state: (state.time_ns, state.rank))]


def shim_event(raw: Any) -> dict[str, Any]:
    """A line of a shim: whole numbers, and the list of signals passed on. TypeError for anything else: the script can write there too."""
    if not isinstance(raw, dict):
        raise TypeError("no event")
    event: dict[str, Any] = {name: operator.index(value) for name, value in raw.items() if name != "passed"}
    if "code" in event:
        event["passed"] = [operator.index(number) for number in raw["passed"]]
    return event


def exit_event(state: RankState) -> dict[str, Any]:
    return {"rank": state.rank, "pid": state.pid, "code": state.code, "time_ns": state.time_ns, "by_us": state.by_us}


def never_launched(error: str) -> dict[str, Any]:
    """The ending of a run of which no process was started."""
    ending = {"reason": "launch-failed", "started": False, "exits": [], "left_behind": [], "oom_kills": 0, "launcher_error": error, "wall_s": 0.0}
    return {"ev": ENDING, **ending}


def job_line(plan: Plan, run_dir: Path, command: Command) -> str:
    job = Job(plan.run_id, str(run_dir.absolute()), plan.world_size, plan.grace_s, command)
    return json.dumps({"do": RUN, **asdict(job)}) + "\n"


def parse_job(line: Mapping[str, Any]) -> Job:
    return Job(line["run_id"], line["run_dir"], line["world_size"], line["grace_s"], parse_command(line["command"]))


def parse_command(raw: Mapping[str, Any]) -> Command:
    warmth = raw["warmth"] and Warmth(**{**raw["warmth"], "preload": tuple(raw["warmth"]["preload"])})
    fallback = raw["fallback"] and parse_command(raw["fallback"])
    return Command(tuple(raw["argv"]), raw["env"], raw["cwd"], raw["foreground"], warmth or None, fallback or None, raw["note"])
