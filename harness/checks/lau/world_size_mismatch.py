"""LAU110 world-size-mismatch: the process group does not have the size that the launcher started.

What it does
    Compares the world that the launcher started with the world_size that init_process_group is asked for, and with the group that came of
    it. An error.

Why it is bad
    Asked for more than there are, init_process_group waits for ranks that nobody starts. Asked for one on every rank, each trains alone: N
    independent trainings that overwrite each other's files.

Wrong
    parser.add_argument("--world-size", type=int, default=4)
    dist.init_process_group("gloo", rank=args.rank, world_size=args.world_size)

Right
    dist.init_process_group("gloo")      # rank and world size come from the launcher's environment

Known limits
    A script that makes its own processes (mp.spawn) has a world of its own and is compared with nothing, also where it is
    rank 0 of it itself.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.lau import rendezvous
from harness.model import Finding, Severity
from harness.record import Event, Run


class WorldSizeMismatch(Check):
    code = "LAU110"
    name = "world-size-mismatch"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG*", "LAU101", "LAU111", "LAU113", "LAU121", "LAU124", "SYN126", "DAT102", "OUT102", "OUT103", "CKP101")

    def end(self, run: Run) -> Iterable[Finding]:
        mains = rendezvous.mains(run)
        tried = [(rank, e) for rank, r in mains for e in r.of("pg")]
        if not tried:
            raise NotApplicable("no rank that the launcher started made a process group")
        launched = run.plan.world_size
        wrong = [(rank, e, size) for rank, e in tried if (size := _size(e)) > 0 and size != launched]
        if any(r.role == "child" for r in run.present) and len(run.present) == run.world_size:
            wrong = [item for item in wrong if item[2] != run.world_size]  # it made the other ranks itself, and they came
        sub = [item for item in wrong if item[2] < launched and not self._alone(wrong, launched)]
        wrong = [item for item in wrong if item not in sub]
        if not wrong:
            return
        _, event, size = wrong[0]
        ranks = sorted({rank for rank, _, _ in wrong})
        if size == 1:
            message = f"every rank made a group of 1 process: {launched} independent trainings where the launcher started {launched} ranks"
        elif size > launched:
            message = (
                f"init_process_group asks for {size} processes, the launcher started {launched}: it waits for ranks that nobody starts"
            )
        else:
            message = f"the process group has {size} ranks, the launcher started {launched}"
        yield self.finding(
            message,
            where=event.where,
            ranks=ranks,
            notes=[f"WORLD_SIZE of the launcher is {launched}, world_size asked for is {size}"],
            help='call `dist.init_process_group(backend)` without rank and world_size, or pass `world_size=int(os.environ["WORLD_SIZE"])`',
        )

    def _alone(self, wrong: list[tuple[int, Event, int]], launched: int) -> bool:
        """Smaller groups are a mismatch only where every launched rank has one: one rank may serve as something else."""
        return len({rank for rank, _, _ in wrong}) >= launched


def _size(event: Event) -> int:
    asked = event["asked"]
    wanted = asked.get("world_size") if isinstance(asked, dict) else None
    size = event["world_size"] if event["done"] else wanted
    return size if isinstance(size, int) and not isinstance(size, bool) else 0
