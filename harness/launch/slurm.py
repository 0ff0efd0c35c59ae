"""The Slurm launcher, on the controller's side: follows and stops what slurm_jobs.py submits. Imports neither torch nor submitit.

The verdict rests on what ranks and nodes wrote into the run folder. Slurm is asked for what only it knows: why a job waits, and how it ended.
Inside an allocation the same tasks run as a job step of it, under the local supervisor.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from harness import attempt, rundir
from harness.launch import slurm_jobs, slurm_layout
from harness.launch.command import Command
from harness.launch.gang import FOLDER_DELETED
from harness.launch.slurm_follow import Follower, ending_of
from harness.launch.slurm_queue import GONE, Inquiry, JobState
from harness.model import Ending, Plan, Scheduler
from harness.probe import protocol

LATE_S = 5.0  # what the nodes wrote last may reach a network file system's clients late
STATE_WAIT_S = 45.0  # for Slurm's own word on a run that failed: a job completes when its last node has
STEP_END_S = 60.0
CANCEL_AFTER_S = 15.0  # behind the grace: nodes that do not obey the control file by then are cancelled
GIVE_UP_S = 30.0  # behind that: neither the nodes nor Slurm say a word, and who pressed Ctrl-C wants to go


def command(plan: Plan, run_dir: Path) -> Command:
    """What is started here: sbatch's call for a job, srun's for a step of the allocation that we stand in."""
    if slurm_layout.settings_of(plan).allocation:
        return Command(tuple(slurm_layout.step_command(plan, run_dir)), {}, plan.cwd)
    folder = slurm_layout.submission_dir(run_dir)
    return Command(("sbatch", str(folder / "submission.sh")), {}, str(folder))


LAUNCHER = command


class Carrier(Protocol):
    """What carries the run: a job of its own, or a step."""

    def poll(self, pressing: bool) -> JobState | None: ...
    def cancel(self) -> bool: ...  # False: not yet


class Job:
    """A batch job that we submitted. `folder`: where an earlier controller did; another job may bear its number by now, and is left alone."""

    def __init__(self, job_id: str, folder: str = "") -> None:
        self.job_id, self._is_ours = job_id, not folder
        self.scancel: subprocess.Popen[bytes] | None = None  # not waited for: it may take minutes where slurmctld is away
        self._inquiry = Inquiry(job_id, folder)

    def poll(self, pressing: bool) -> JobState | None:
        state = self._inquiry.poll(pressing)
        self._is_ours = self._is_ours or (state is not None and not state.ended)
        return state

    def cancel(self) -> bool:
        if self._is_ours:
            self.scancel = subprocess.Popen(
                ["scancel", self.job_id], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )
        return self._is_ours


class Step:
    """A step of an allocation: srun, owned by the local supervisor."""

    def __init__(self, inner: Any, job_id: str) -> None:
        self.job_id, self._inner = job_id, inner
        self.error = ""

    def poll(self, pressing: bool) -> JobState | None:
        ending = self._inner.poll()
        if ending is None:
            return JobState("RUNNING")
        self.error = ending.launcher_error
        return JobState("COMPLETED" if not ending.launcher_error else "FAILED")

    def cancel(self) -> bool:
        self._inner.stop("interrupted")
        return True


class SlurmHandle:
    """One run on Slurm: what is known of it so far, and a way to end it."""

    def __init__(self, plan: Plan, run_dir: Path, carrier: Job | Step, number: int = 0) -> None:
        self.plan, self.run_id, self._run_dir, self._carrier = plan, plan.run_id, run_dir, carrier
        self.follower = Follower(run_dir, number)
        self.job_id = carrier.job_id
        self.state: JobState | None = None
        self.pending_s = 0.0
        self._begun = self._since = time.monotonic()
        self._settling_since: float | None = None
        self._stopped_at: float | None = None
        self._cancelled = False
        self._ending: Ending | None = None

    # ---- what the session looks at

    @property
    def fallback(self) -> str:
        return self.follower.account.fallback

    @property
    def pids(self) -> dict[int, int]:
        return self.follower.account.pids

    @property
    def attempt(self) -> int:
        return self.follower.attempt

    @property
    def queued(self) -> str:
        """Why nothing runs yet, in a few words; empty once Slurm has started the job."""
        if self.follower.account.hellos:
            return ""
        if self.state is None:
            return f"job {self.job_id} submitted"
        return f"job {self.job_id} is {self.state.state.lower()}" + (f": {self.state.reason}" if self.state.reason else "") if self.state.waits else ""

    def poll(self) -> Ending | None:
        if self._ending is None:
            self._follow()
            self._ending = self._decide()
        return self._ending

    def stop(self, reason: str) -> None:
        """By the control file, so that every node ends its ranks in order; by scancel where nothing runs yet or nobody obeys."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            self._cancel_if_nothing_runs()
            with contextlib.suppress(OSError):  # a full disk: scancel follows
                attempt.write_note(self._run_dir / attempt.CONTROL, f"stop {reason}\n")

    def _cancel_if_nothing_runs(self) -> None:
        if self._stopped_at is not None and not self.follower.account.hellos:
            self._cancel()

    def _cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = self._carrier.cancel()

    # ---- following

    def _follow(self) -> None:
        account = self.follower.poll()
        if attempt.is_gone(self._run_dir):
            self.stop(FOLDER_DELETED)
        self.state = self._carrier.poll(pressing=self._all_told or self._cancelled) or self.state
        self._cancel_if_nothing_runs()
        if not account.hellos and (self.state is None or self.state.waits):
            self.pending_s = time.monotonic() - self._since
        requeued = self.state is not None and self.state.restarts > self.attempt
        if requeued and self._stopped_at is not None:
            self._cancel()  # we wanted its end: the new attempt must not run, and the verdict is on this one
        elif requeued and self.state is not None:
            self.follower.begin(self.state.restarts)
            self._settling_since = None
            self._since = time.monotonic()
        if self._stopped_at is not None and time.monotonic() > self._late_at:
            self._cancel()

    @property
    def _late_at(self) -> float:
        return (self._stopped_at or 0.0) + self.plan.grace_s + CANCEL_AFTER_S

    @property
    def settling(self) -> bool:
        """All nodes have told their ending; Slurm's word on it is all that is missing, and nothing can hang any more."""
        return self._all_told

    @property
    def _all_told(self) -> bool:
        return len(self.follower.account.endings) >= slurm_layout.num_agents(self.plan)

    def _decide(self) -> Ending | None:
        """Ended when all nodes have said so and nothing is left to be explained, or when Slurm says that the job is over."""
        account, state = self.follower.account, self.state
        over = state is not None and state.ended
        if self._stopped_at is not None and time.monotonic() > self._late_at + GIVE_UP_S:
            return self._end(state.state if over and state is not None else "")
        if not over and not self._all_told:
            self._settling_since = None
            return None
        if self._all_told and (account.clean or self._stopped_at is not None):
            return self._end("")
        now = time.monotonic()
        self._settling_since = self._settling_since or now
        if over and (self._all_told or now > self._settling_since + LATE_S):
            return self._end(state.state if state is not None else "")
        return self._end("") if now > self._settling_since + STATE_WAIT_S else None

    def _end(self, state: str) -> Ending:
        account = self.follower.account
        if not self._all_told:  # a host that Slurm has lost may live on, cut off from it but not from the folder
            with contextlib.suppress(OSError):
                attempt.write_note(self._run_dir / attempt.CONTROL, "stop scheduler\n")
        told = ending_of(account, time.monotonic() - self._begun)
        known = self.state or JobState("")
        scheduler = Scheduler(self.job_id, state or known.state, known.reason, known.nodes, self.attempt, round(self.pending_s, 3))
        reason = told.reason
        if self._stopped_at is None and state in ("TIMEOUT", "DEADLINE"):
            reason = "timeout"
        elif self._stopped_at is None and state not in ("", "COMPLETED", "FAILED", "OUT_OF_MEMORY") and not account.clean:
            reason = "scheduler"
        if attempt.is_gone(self._run_dir):
            reason = FOLDER_DELETED
        error = told.launcher_error
        if self._stopped_at is None and reason == "exited" and told.started and state not in ("", "COMPLETED", "OUT_OF_MEMORY"):
            error = self._who_went(state) or error
        left = told.left_behind
        if self._stopped_at is not None and not self._all_told and not known.ended:
            left = (*left, f"job {self.job_id}, of whose end neither Slurm nor its nodes have told: squeue -j {self.job_id}; scancel {self.job_id}")
        if not told.started and not error:
            error = self._why_nothing_ran(state)
        if not told.started and reason == "exited":
            reason = "launch-failed"
        return replace(told, reason=reason, left_behind=left, launcher_error=error, scheduler=scheduler)

    def _who_went(self, state: str) -> str:
        """Nodes whose supervisor never told how its ranks ended, in a job that did not complete: it was killed, and they went with it."""
        account = self.follower.account
        nodes = sorted(str(hello.get("node", agent)) for agent, hello in account.hellos.items() if agent not in account.endings)
        if not nodes:
            return ""
        lost = sorted(account.pids.keys() - account.exits.keys())
        with_it = f"; rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))} went with it" if lost else ""
        said = "\n".join(_tail(slurm_layout.submission_dir(self._run_dir)))
        return f"the supervisor on {', '.join(nodes)} went away without a word, and Slurm says {state}{with_it}\n{said}".strip()

    def _why_nothing_ran(self, state: str) -> str:
        said = self._carrier.error if isinstance(self._carrier, Step) else "\n".join(_tail(slurm_layout.submission_dir(self._run_dir)))
        head = f"job {self.job_id} ended" + (f" as {state}" if state and state != GONE else "") + " before a rank was started"
        return f"{head}\n{said}".strip()


def _tail(folder: Path, num_lines: int = 8) -> list[str]:
    """The last lines of the job's own log."""
    lines: list[str] = []
    for path in sorted(folder.glob("job-*.log")):
        if path.is_file() and not path.is_symlink():
            lines += path.read_bytes()[-8192:].decode("utf-8", "replace").splitlines()
    return [line for line in lines if line.strip()][-num_lines:]


class Rejected:
    """A run whose job Slurm did not take."""

    fallback, queued, attempt, job_id, settling = "", "", 0, "", False

    def __init__(self, said: str) -> None:
        self.pids: dict[int, int] = {}
        self._said = said

    def poll(self) -> Ending:
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in self._said.splitlines() if line.strip()]
        text = "; ".join(dict.fromkeys(lines)) or "sbatch said nothing"
        return Ending("launch-failed", False, launcher_error=f"slurm took no job: {text}", scheduler=Scheduler(rejected=text))

    def stop(self, reason: str) -> None:
        """Nothing runs."""


def _has_reference(run_dir: Path) -> bool:
    return (run_dir / rundir.REFERENCE_DIR / protocol.PLAN_FILE).is_file()


class SlurmLauncher:
    """What the session knows as its supervisor, for runs on Slurm. `local`: the supervisor that owns srun inside an allocation."""

    def __init__(self, local: Any) -> None:
        self._local = local
        self._handle: SlurmHandle | None = None
        self._inner: Any = None
        self._rejected: dict[Path, str] = {}
        self._submitted: set[Path] = set()

    def submit(self, runs: Sequence[tuple[Plan, Path]]) -> None:
        """Runs of the same shape become one array: one line in the queue, one decision of the scheduler."""
        folder_of = {id(plan): run_dir for plan, run_dir in runs}
        for plans in slurm_jobs.grouped([plan for plan, _ in runs]):
            folders = [folder_of[id(plan)] for plan in plans]
            answer = slurm_jobs.submit(plans, folders, any(_has_reference(run_dir) for run_dir in folders))
            if isinstance(answer, str):
                self._rejected.update(dict.fromkeys(folders, answer))
            else:
                self._submitted.update(folders)

    def start(self) -> None:
        """Nothing to start: nodes bring their own supervisors."""

    def run(self, plan: Plan, run_dir: Path) -> SlurmHandle | Rejected:
        if self._is_reference(run_dir):
            return self._follow_reference(plan, run_dir)
        if run_dir in self._rejected:
            return Rejected(self._rejected[run_dir])
        job_id, folder = slurm_jobs.noted(run_dir)
        if not job_id and slurm_layout.settings_of(plan).allocation:
            return self._step(plan, run_dir)
        if not job_id:
            answer = slurm_jobs.submit([plan], [run_dir], _has_reference(run_dir))
            if isinstance(answer, str):
                return Rejected(answer)
            job_id = answer[0]
            self._submitted.add(run_dir)
        job = Job(job_id, "" if run_dir in self._submitted else folder)
        self._handle = SlurmHandle(plan, run_dir, job, attempt.newest(run_dir))
        return self._handle

    def _step(self, plan: Plan, run_dir: Path) -> SlurmHandle:
        attempt.make(run_dir, 0)
        attempt.write_note(run_dir / attempt.CONTROL, "")
        if self._inner is not None:
            self._inner.wait(STEP_END_S)  # one step after another: the allocation has room for one
        self._inner = inner = self._local.run(plan, run_dir)
        self._handle = SlurmHandle(plan, run_dir, Step(inner, slurm_layout.settings_of(plan).allocation))
        return self._handle

    def _is_reference(self, run_dir: Path) -> bool:
        return run_dir.name == rundir.REFERENCE_DIR and self._handle is not None

    def _follow_reference(self, plan: Plan, run_dir: Path) -> SlurmHandle:
        """Agent 0 makes it, in the same job, after the run itself."""
        assert self._handle is not None
        return SlurmHandle(replace(plan, slurm=None, nodes=1), run_dir, self._handle._carrier, self._handle.attempt)

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        """A job goes on without us; what we own here is srun."""
        self._local.close()



__all__ = ["LAUNCHER", "SlurmHandle", "SlurmLauncher"]
