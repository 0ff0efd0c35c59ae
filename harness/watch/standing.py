"""Where every process of a run stands right now, from its status page and its answer to a request for stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import attempt
from harness.model import Plan, RankStacks, Where
from harness.watch import stacks
from harness.watch.progress import Moment, Watch
from harness.watch.pulses import Pulses


@dataclass(frozen=True)
class Standing:
    """One rank: what it is in, since when, and its threads (innermost frame last); no threads where it gave no answer."""

    rank: int
    pid: int
    step: int
    phase: str
    op: str
    site: str
    age_s: float
    alive: bool
    threads: Mapping[str, tuple[Where, ...]]


def ask(run_dir: Path, plan: Plan) -> list[Standing]:
    """One entry a process that shows itself; ranks in order."""
    if plan.launcher != "slurm":
        answers = {each.rank: each for each in stacks.ask(run_dir)}
        return combine(Watch(run_dir, plan).poll().moments, answers)
    latest = attempt.folder_of(run_dir, attempt.newest(run_dir))
    host = Pulses(latest)  # pids of other hosts mean nothing here
    host.look()
    answers = {each.rank: each for each in stacks.ask(latest, stacks.REMOTE_WAIT_S, lives=host.lives)}
    return combine(Watch(latest, plan, host=host).poll().moments, answers)


def combine(moments: Sequence[Moment], answers: Mapping[int, RankStacks]) -> list[Standing]:
    told: set[int] = set()
    found = []
    for m in sorted(moments, key=lambda m: (m.rank, m.pid)):
        threads = answers[m.rank].threads if m.rank in answers and m.rank not in told else {}
        told.add(m.rank)
        found.append(Standing(m.rank, m.pid, m.step, m.phase, m.op, m.site, round(m.age_s, 1), m.alive, dict(threads)))
    return found
