"""What a run on Slurm adds to the watch: it waits in a queue, it may be requeued, and it can be left alone and found again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Protocol

from harness.model import Ending, Plan, Scheduler
from harness.report.live import Live

ASK_S = 5.0  # after Ctrl-C: a second one within that time cancels the job
DETACHED = "detached"
BLOCKED = (
    "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "PartitionDown", "PartitionInactive", "ReqNodeNotAvail", "BadConstraints",
    "InvalidAccount", "InvalidQOS", "DependencyNeverSatisfied", "JobHeldUser", "JobHeldAdmin", "AccountNotAllowed", "QOSNotAllowed",
)  # fmt: skip


class Queued(Protocol):
    """A run on Slurm (harness/launch/slurm.py)."""

    job_id: str

    @property
    def pids(self) -> dict[int, int]: ...
    @property
    def queued(self) -> str: ...
    @property
    def attempt(self) -> int: ...
    @property
    def settling(self) -> bool: ...


class Queue:
    """One run's way through the queue, seen from the controller."""

    def __init__(self, handle: Queued, plan: Plan, folder: Path, live: Live, *, detach: bool, quiet: bool) -> None:
        self._handle, self._plan, self._folder, self._live = handle, plan, folder, live
        self._detach, self._quiet = detach, quiet
        self._since = time.monotonic()
        self._leave_at: float | None = None
        self._warned = False
        self._limit_s = plan.slurm.max_pending_s if plan.slurm is not None else None
        self.attempt = handle.attempt
        if handle.job_id and not quiet:
            self._say_job()

    def _say_job(self) -> None:
        job = self._handle.job_id
        if self._plan.slurm is not None and self._plan.slurm.allocation:
            return self._live.note(f"inside Slurm job {job}: a step of its allocation, by srun")
        self._live.note(f"Slurm job {job}: squeue -j {job}; scancel {job}; harness attach {shown(self._folder, self._plan.cwd)}")
        return None

    @property
    def waits(self) -> bool:
        return bool(self._handle.queued)

    @property
    def settles(self) -> bool:
        """Nothing runs any more: our limits and the hang watch do not count."""
        return self._handle.settling

    def line(self) -> str:
        self._warn_once()
        return f"{self._handle.queued}, waiting {time.monotonic() - self._since:.0f} s"

    def _warn_once(self) -> None:
        """Some reasons do not go away by waiting."""
        reason = next((word for word in BLOCKED if f": {word}" in self._handle.queued), "")
        if reason and not self._warned:
            self._warned = True
            self._live.note(f"{reason}: as it was asked for, the job may wait for ever; Ctrl-C twice cancels it, --max-pending does so by itself")

    def waited_too_long(self) -> bool:
        return self._limit_s is not None and self.waits and time.monotonic() > self._since + self._limit_s

    def requeued(self) -> bool:
        """Whether a new attempt has begun since the last look."""
        if self._handle.attempt == self.attempt:
            return False
        self.attempt, self._since = self._handle.attempt, time.monotonic()
        self._live.note(f"Slurm has put job {self._handle.job_id} back into the queue; what it left is put aside, attempt {self.attempt + 1} follows")
        return True

    def leaves(self, number: int | None, again: bool) -> bool:
        """Whether we go and leave the job alone: --detach, a lost terminal, or Ctrl-C that was not repeated in time."""
        if self._detach or number == signal.SIGHUP:
            return True
        if number != signal.SIGINT or again:
            return False
        if self._leave_at is None:
            self._leave_at = time.monotonic() + ASK_S
            self._live.note(f"leaving job {self._handle.job_id} alone in {ASK_S:.0f} s; Ctrl-C again cancels it")
        return time.monotonic() >= self._leave_at

    def cancels(self, number: int | None, again: bool) -> bool:
        return again or number == signal.SIGTERM

    def left(self) -> Ending:
        job = self._handle.job_id
        self._live.note(f"job {job} goes on without us; come back with: harness attach {shown(self._folder, self._plan.cwd)}")
        return Ending(DETACHED, bool(self._handle.pids), scheduler=Scheduler(job, "", attempt=self.attempt))


def shown(folder: Path, cwd: str) -> str:
    """The folder as one would type it."""
    import shlex

    home = str(Path(cwd) / ".harness") + os.sep
    text = str(folder)
    return shlex.quote(text.removeprefix(home) if text.startswith(home) else text)
