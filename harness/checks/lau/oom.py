"""Whether a SIGKILL came from the kernel for want of memory: what the ranks' probes saw of the kernel's counters, and what the logs
say."""

from __future__ import annotations

import re
import signal

from harness.checks.lau.blame import Fall
from harness.record import Run

LOG_SAYS = re.compile(r"oom[-_ ]kill|out of memory: killed process|memory cgroup out of memory|exceeded memory limit", re.IGNORECASE)


def watched(run: Run) -> bool:
    """Whether any process could have seen the kernel's counter rise after the kill: it must have outlived it."""
    return len(run.processes) > 1


def killed(run: Run, fall: Fall) -> str | None:
    """Evidence that this SIGKILL was an out-of-memory kill; None where there is none."""
    if fall.exit is None or fall.exit.code != -signal.SIGKILL:
        return None
    for process in run.processes:
        for event in process.of("oom_kills"):
            if event.t_ns < fall.exit.time_ns + 30_000_000_000:
                return f"the kernel's counter of out-of-memory kills ({event['scope']}) rose while the job ran"
    if run.ending.oom_kills:  # the supervisor looks too: it outlives every rank
        return "the kernel's counter of out-of-memory kills (host) rose while the job ran"
    if slurm_says(run):
        return "Slurm ended the job as OUT_OF_MEMORY"
    if any(LOG_SAYS.search(log[-20_000:]) for log in run.logs.values()):
        return "the output speaks of an out-of-memory kill"
    return None


def slurm_says(run: Run) -> bool:
    """The job's control group ran out of the memory that was asked for."""
    return run.ending.scheduler is not None and run.ending.scheduler.state == "OUT_OF_MEMORY"


def last_rss_bytes(run: Run, rank: int) -> int:
    """Resident memory of a rank when it was last seen; 0: unknown."""
    recording = run.ranks[rank] if 0 <= rank < len(run.ranks) else None
    if recording is None:
        return 0
    last = recording.row(recording.num_rows - 1).rss_bytes if recording.num_rows else 0
    for event in recording.of("rss")[-1:]:
        samples = event["samples"]
        if isinstance(samples, list) and samples and isinstance(samples[-1], list) and isinstance(samples[-1][-1], int):
            last = max(last, samples[-1][-1])
    return last
