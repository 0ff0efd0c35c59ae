"""What the nodes of a job tell, gathered into one account of the run. The controller's side of slurm_node.py; pure but for reading files."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import attempt
from harness.launch import job as wire
from harness.model import Ending, RankExit


def parse_exit(raw: Mapping[str, Any]) -> RankExit:
    return RankExit(int(raw["rank"]), int(raw["pid"]), int(raw["code"]), int(raw["time_ns"]), bool(raw["by_us"]))


@dataclass(frozen=True)
class NodeEnding:
    """How one node's share of a run ended."""

    reason: str
    exits: tuple[RankExit, ...]
    launcher_error: str
    left_behind: tuple[str, ...]
    oom_kills: int
    wall_s: float

    @classmethod
    def parse(cls, event: Mapping[str, Any]) -> NodeEnding:
        exits = tuple(parse_exit(raw) for raw in event["exits"])
        left = tuple(str(thing) for thing in event["left_behind"])
        killed = any(e.code == -signal.SIGKILL and not e.by_us for e in exits)  # the counter is its host's: it tells of this node's ranks only
        oom_kills = int(event.get("oom_kills", 0))
        return cls(str(event["reason"]), exits, str(event["launcher_error"]), left, oom_kills if killed else 0, float(event["wall_s"]))


@dataclass
class Account:
    """One attempt of one run, as far as it was told."""

    hellos: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, RankExit] = field(default_factory=dict)
    endings: dict[int, NodeEnding] = field(default_factory=dict)
    fallback: str = ""

    def take(self, agent: int, event: Mapping[str, Any]) -> None:
        kind = event["ev"]
        if kind == "hello":
            self.hellos[agent] = event
        elif kind == wire.RANK:
            self.pids[int(event["rank"])] = int(event["pid"])
        elif kind == wire.EXIT:
            self._exit(event)
        elif kind == wire.FALLBACK:
            self.fallback = str(event["reason"])
        elif kind == wire.ENDING:
            self.endings[agent] = NodeEnding.parse(event)
            self.exits.update({e.rank: e for e in self.endings[agent].exits})

    def _exit(self, raw: Mapping[str, Any]) -> None:
        told = parse_exit(raw)
        self.exits[told.rank] = told

    @property
    def clean(self) -> bool:
        """Every agent that ended did so by itself, with nothing to say."""
        return bool(self.endings) and all(
            e.reason == "exited" and not e.launcher_error and all(x.code == 0 for x in e.exits) for e in self.endings.values()
        )


class Follower:
    """Reads one attempt after another; an earlier one is forgotten where a later one begins."""

    def __init__(self, run_dir: Path, number: int = 0) -> None:
        self._run_dir = run_dir
        self.begin(number)

    def begin(self, number: int) -> None:
        self.attempt = number
        self.folder = attempt.folder_of(self._run_dir, number)
        self.account = Account()
        self._told = attempt.Told(self.folder)

    def poll(self) -> Account:
        for agent, event in self._told.events():
            try:
                self.account.take(agent, event)
            except (KeyError, ValueError, TypeError):  # a line that is not ours
                continue
        return self.account


REASONS = ("timeout", "hang", "fail-fast", "interrupted")


def ending_of(account: Account, wall_s: float) -> Ending:
    """The run's ending as its nodes tell it; what Slurm says comes on top (slurm.py)."""
    told = account.endings
    exits = sorted(account.exits.values(), key=lambda e: (e.time_ns, e.rank))
    reasons = {e.reason for e in told.values()}
    reason = next((word for word in REASONS if word in reasons), "exited" if account.pids else "launch-failed")
    failed = any(e.code != 0 and not e.by_us for e in exits)
    errors = [] if failed else [_named(account, agent, e.launcher_error) for agent, e in sorted(told.items()) if e.launcher_error]
    left = [_named(account, agent, thing) for agent, e in sorted(told.items()) for thing in e.left_behind]
    walls = [e.wall_s for e in told.values()]
    oom_kills = max((e.oom_kills for e in told.values()), default=0)
    return Ending(
        reason, bool(account.pids), tuple(exits), 0.0, (), tuple(left), "\n".join(errors), max([*walls, 0.0]) or wall_s, oom_kills=oom_kills
    )


def _named(account: Account, agent: int, text: str) -> str:
    host = str(account.hellos.get(agent, {}).get("node", "")) or f"agent {agent}"
    return text if len(account.hellos) < 2 else f"{host}: {text}"
