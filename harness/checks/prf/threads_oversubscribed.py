"""PRF104 threads-oversubscribed: the ranks of a host have more threads than the host has cores.

What it does
    Multiplies torch's threads of a rank by the ranks of its host. More than the cores is advice; a warning where every rank asks for the
    number of the machine's cores (`os.cpu_count()`) and takes them all.

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
from harness.record import Event, Run


class ThreadsOversubscribed(Check):
    code = "PRF104"
    name = "threads-oversubscribed"
    severity = Severity.ADVICE
    substantial = False  # a script that trains nothing prints and has threads too

    def end(self, run: Run) -> Iterable[Finding]:
        by_host: dict[str, list[tuple[int, Event | None]]] = {}
        for recording in run.present:
            told = [e["threads"] for e in recording.of("torch") if isinstance(e["threads"], int)]
            told += [e["threads"] for e in recording.of("devices") if isinstance(e["threads"], int)]
            chosen = max((e for e in recording.of("threads") if isinstance(e["num"], int)), key=lambda e: e["num"], default=None)
            if told or chosen is not None:
                num = max(told[-1] if told else 1, chosen["num"] if chosen is not None else 1)
                by_host.setdefault(str(recording.start.get("host") or ""), []).append((num, chosen))
        if not by_host:
            raise NotApplicable("no rank told its number of threads")
        for ranks in by_host.values():
            threads = [num for num, _ in ranks]
            if len(threads) > 1 and sum(threads) > run.num_cores and max(threads) > 1:
                chosen = next((e for _, e in ranks if e is not None), None)
                # each rank asks for all cores of the machine: that is no number that somebody chose for another machine
                claims = all(e is not None and e["from_cores"] and num >= run.num_cores for num, e in ranks)
                yield self.finding(
                    f"{len(threads)} ranks with {max(threads)} threads each on {run.num_cores} cores",
                    where=chosen.where if chosen is not None else None,
                    severity=Severity.WARNING if claims else None,
                    notes=[f"{sum(threads)} threads in all, OMP_NUM_THREADS is what torchrun sets to 1 unless it is set"],
                    help=f"set OMP_NUM_THREADS={max(1, run.num_cores // len(threads))}, or call torch.set_num_threads",
                )
                return
