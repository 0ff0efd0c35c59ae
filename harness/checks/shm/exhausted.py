"""SHM106 shared-memory-exhausted: /dev/shm is full, and a process dies of a bus error or cannot allocate shared memory.

What it does
    Looks for an exit by SIGBUS (-7), or a failure that names shared memory, and for the room that was left in /dev/shm.

Why it is bad
    Loader workers and shared models put their tensors into /dev/shm. Containers give it 64 MB by default; the first write beyond ends the
    process without a traceback.

Wrong
    docker run image python train.py

Right
    docker run --shm-size=8g image python train.py        # or --ipc=host; or fewer workers

Known limits
    A bus error can have other causes (a file cut short under a memory map); without a sign of a full /dev/shm it is not blamed on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity, Where
from harness.record import Run, number

_SAYS = re.compile(
    r"insufficient shared memory|unable to (allocate|write to|resize|mmap|open) (the )?(shared memory|file </torch_)"
    r"|/torch_\d+\S*.*No space left|out of shared memory",
    re.IGNORECASE,
)
SIGBUS = -7
MIB = 2**20


class SharedMemoryExhausted(Check):
    code = "SHM106"
    name = "shared-memory-exhausted"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU102", "LAU103", "LAU122", "HNG*", "SHM101", "SHM105")
    substantial = False

    def end(self, run: Run) -> Iterable[Finding]:
        room = [e for p in run.processes for kind in ("share_memory", "process_start") for e in p.of(kind) if number(e["shm_total"]) > 0]
        said = [(p.rank, e.where, str(e["message"])) for p in run.processes for e in p.of("failure") if _SAYS.search(str(e["message"]))]
        by_log = [(rank, found.group(0)) for rank, text in run.logs.items() if (found := _SAYS.search(text))]
        killed = [e.rank for e in run.ending.exits if e.code == SIGBUS]
        killed += [max(p.rank, 0) for p in run.processes for e in p.of("process_join") if e["exitcode"] == SIGBUS]
        low = min((number(e["shm_free"]) for e in room), default=-1)
        if said:
            rank, where, text = said[0]
        elif (killed and by_log) or (by_log and any(e.code for e in run.ending.exits)):
            rank, where, text = by_log[0][0], self._where(run), by_log[0][1]
        elif killed and 0 <= low < 16 * MIB:
            rank, where, text = killed[0], self._where(run), "a process ended by SIGBUS"
        elif not room and not killed:
            raise NotApplicable("no memory is shared")
        else:
            return
        yield self.finding(
            "shared memory (/dev/shm) is exhausted",
            where=where,
            ranks=(max(rank, 0),),
            notes=[
                text.splitlines()[0][:160],
                *([f"{low // MIB} MiB were free, of {number(room[-1]['shm_total']) // MIB} MiB"] if room else []),
            ],
            help="give the container more (`--shm-size=8g` or `--ipc=host`), or use fewer workers and smaller batches",
        )

    def _where(self, run: Run) -> Where | None:
        return next(
            (
                e.where
                for p in run.processes
                for kind in ("process_start", "share_memory", "loader")
                for e in reversed(p.of(kind))
                if e.where
            ),
            None,
        )
