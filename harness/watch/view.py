"""What the session asks of the watch: one line for the user, whether the run hangs, and the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.model import Plan, RankStacks
from harness.watch import stacks
from harness.watch.progress import Moment, Progress, Watch
from harness.watch.pulses import Pulses

TELL_AFTER_S = 3.0  # a shorter wait is not worth a word


class View:
    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self._run_dir, self._plan = run_dir, plan
        self._remote = plan.launcher == "slurm"
        self._host = Pulses(run_dir) if self._remote else None
        self._watch = Watch(run_dir, plan, host=self._host)
        self._progress: Progress | None = None

    def silent_s(self) -> float:
        """How long nothing has moved, if that is a hang; else 0."""
        self._progress = self._watch.poll()
        return self._progress.silent_s if self._progress.hung else 0.0

    def stalled_s(self) -> float:
        """How long nothing had moved when silent_s() last looked, if that may have become a hang; else 0."""
        return self._progress.silent_s if self._progress is not None and self._progress.stalled else 0.0

    def line(self) -> str:
        """Where the run is; reads the pages only if silent_s() has not."""
        return describe(self._progress or self._watch.poll(), self._plan)

    def stacks(self) -> Sequence[RankStacks]:
        if self._host is None:
            return stacks.ask(self._run_dir)
        self._host.look()
        return stacks.ask(self._run_dir, stacks.REMOTE_WAIT_S, lives=self._host.lives)


def describe(progress: Progress, plan: Plan) -> str:
    living = [moment for moment in progress.moments if moment.alive]
    if not progress.moments:
        return f"starting {plan.world_size} {'process' if plan.world_size == 1 else 'processes'}"
    head = f"step {progress.step}" if progress.step else "before the first step"
    pace = f", {progress.steps_per_s:.3g} steps/s" if progress.steps_per_s else ""
    waits = f", {_longest(living)}" if living and progress.silent_s >= TELL_AFTER_S else ""
    return head + pace + waits


def _longest(living: Sequence[Moment]) -> str:
    moment = max(living, key=lambda moment: (bool(moment.op), moment.age_s))
    if not moment.op:
        return f"nothing has moved for {moment.age_s:.0f} s"
    return f"rank {moment.rank} has been in {moment.op} for {moment.age_s:.0f} s"
