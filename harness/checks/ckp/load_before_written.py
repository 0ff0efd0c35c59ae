"""CKP102 load-before-write-done: a rank reads a file that another rank writes, and nothing makes it wait.

What it does
    Looks for a read of a path by one rank and a write of it by another between the same two synchronisations. Where the read failed and the
    writer was ended before it came to write, the call of `torch.save` in the same source file is the witness.

Why it is bad
    Which one is first is a matter of luck: the reader finds no file, half a file, or that of an earlier epoch, which loads without a word.

Wrong
    if rank == 0:
        torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path))

Right
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path))

Known limits
    It is a finding even if it happened to work. Waiting for `os.path.exists` is no cure: the file exists before it is complete. A writer
    that renames a finished file, or makes a second file that the reader waits for, is healthy and silent. Ranks on different nodes are
    not compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.ckp import files, reads
from harness.checks.order import Clocks
from harness.model import Finding, Severity
from harness.record import Run


class LoadBeforeWriteDone(Check):
    code = "CKP102"
    name = "load-before-write-done"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU102", "LAU122", "HNG*", "CKP112", "CKP114", "SYN115")

    def end(self, run: Run) -> Iterable[Finding]:
        if len(run.present) < 2:
            raise NotApplicable("one rank")
        clocks = Clocks(run)
        races = reads.races(run, clocks)
        orphans = reads.orphans(run) if not races else []
        if not races and not orphans:
            if not files.loads(run) and not any(True for _ in run.events("open")):
                raise NotApplicable("no rank reads a file that the run writes")
            return
        if races and not clocks.reliable:
            raise Inconclusive("the ranks counted different numbers of collectives, so reads and writes cannot be put in order")
        told: set[tuple[str, int]] = set()
        for race in sorted(races, key=lambda r: (not r.failed, r.late)):
            where = race.read.where
            key = (where.file, where.line) if where else (race.path, 0)
            if key not in told:
                told.add(key)
                yield self._race(race)
        for orphan in orphans[:1]:
            yield self._orphan(orphan)

    def _race(self, race: reads.Race) -> Finding:
        written = race.write.where
        gap_ms = (race.written_ns - race.read.t_ns) / 1e6
        notes = [
            f"rank {race.writer} writes it at {written.place}"
            if written
            else f"rank {race.writer} writes it"
        ]
        if race.failed:
            notes.append(f"the read failed: {race.failed}")
        elif not race.exact:
            notes.append(f"the two opened it {abs(gap_ms):.1f} ms apart")
        elif race.late:
            notes.append(f"this time the write had ended {-gap_ms:.1f} ms before the read began")
        else:
            notes.append(f"the read began {gap_ms:.1f} ms before the write had ended")
        return self.finding(
            f"rank {race.reader} reads {files.name(race.path)} while rank {race.writer} writes it: no synchronisation lies between the two",
            where=race.read.where,
            ranks=(race.reader, race.writer),
            notes=notes,
            help="call `dist.barrier()` on every rank between the write and the read",
            severity=None if race.failed or not race.late else Severity.WARNING,
            evidence={"path": race.path, "gap_ms": round(gap_ms, 3), "failed": bool(race.failed)},
        )

    def _orphan(self, orphan: reads.Orphan) -> Finding:
        return self.finding(
            f"rank {orphan.load.rank} reads {files.name(orphan.load.path)} before another rank has written it",
            where=orphan.load.begin.where,
            ranks=(orphan.load.rank, *orphan.writers),
            notes=[
                f"the read failed: {orphan.load.error.splitlines()[0][:160]}",
                f"it is saved at line {orphan.line}, `{orphan.text}`, to which rank {orphan.writers[0]} had not come",
            ],
            help="call `dist.barrier()` on every rank between the save and the load",
            evidence={"path": orphan.load.path},
        )
