"""PRF104 threads-oversubscribed: the ranks of a host have more threads than the host has cores.

What it does
    Multiplies torch's threads of a rank by the ranks of its host. More than the cores is advice.

Why it is bad
    Threads of several ranks push each other off the cores: an operation on the CPU takes several times as long, and unevenly so.

Wrong
    torch.set_num_threads(os.cpu_count())            # in each of 8 ranks

Right
    torch.set_num_threads(max(1, os.cpu_count() // local_world_size))
    OMP_NUM_THREADS=1 (what torchrun sets)

Known limits
    A model on GPUs hardly uses them. Threads that are set after the first import of torch are seen at the first new process only.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Run


class ThreadsOversubscribed(Check):
    code = "PRF104"
    name = "threads-oversubscribed"
    severity = Severity.ADVICE
    substantial = False  # a script that trains nothing prints and has threads too

    def end(self, run: Run) -> Iterable[Finding]:
        by_host: dict[str, list[int]] = {}
        for recording in run.present:
            told = [e["threads"] for e in recording.of("torch") if isinstance(e["threads"], int)]
            told += [e["threads"] for e in recording.of("devices") if isinstance(e["threads"], int)]
            if told:
                by_host.setdefault(str(recording.start.get("host") or ""), []).append(told[-1])
        if not by_host:
            raise NotApplicable("no rank told its number of threads")
        for threads in by_host.values():
            if len(threads) > 1 and sum(threads) > run.num_cores and max(threads) > 1:
                yield self.finding(
                    f"{len(threads)} ranks with {max(threads)} threads each on {run.num_cores} cores",
                    notes=[f"{sum(threads)} threads in all, OMP_NUM_THREADS is what torchrun sets to 1 unless it is set"],
                    help=f"set OMP_NUM_THREADS={max(1, run.num_cores // len(threads))}, or call torch.set_num_threads",
                )
                return
