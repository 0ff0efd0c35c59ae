"""DAT126 file-position-shared: forked workers seek and read in one open file, and move each other's position.

What it does
    Looks, before a loader forks its workers, for files that its dataset holds open, itself or through what it holds (a reader, a zipfile), and in the
    first two fetches of each worker whether that very file is seeked and read in, and its position moves. So too in processes that the script forks
    itself. Two such workers at one time are an error.

Why it is bad
    A fork copies the file object, not the file's position: that is the system's, and one for all. Between the seek of a worker and its read another
    one seeks: the sample holds the bytes of another sample, under its own label. Nothing is said, and without workers all is right.

Wrong
    class Clips(Dataset):
        def __init__(self, path):
            self.pack = open(path, "rb")
        def __getitem__(self, i):
            self.pack.seek(self.offsets[i])
            return decode(self.pack.read(self.sizes[i]))

Right
    def __getitem__(self, i):
        if self.pack is None:                               # opened by each worker for itself, at its first sample: let the parent read none
            self.pack = open(self.path, "rb")

    os.pread(self.pack.fileno(), size, offset)              # or: a read that takes its position along; mmap

Known limits
    Sees workers that are forked. Reads that C code makes on the descriptor by itself (h5py, lmdb) are not seen. Workers that take a lock of
    multiprocessing, of fcntl, or of a file that they remove again, around their reads are taken for right. A descriptor by its number (os.open) is not
    followed where there are several of them or the loader has a worker_init_fn, which may open it again.
    One worker beside a main process that reads the same file is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, number, where_of


class FilePositionShared(Check):
    code = "DAT126"
    name = "file-position-shared"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        with_workers = [e for _, e in run.events("loader") if number(e["num_workers"]) > 1]
        forked = [p for p in run.processes if p.role == "child"]
        if not with_workers and not forked:
            raise NotApplicable("no loader has several workers, and the script starts no processes")
        told = [(rank, e, e["file"]) for rank, e in run.events("pass") if isinstance(e["file"], Mapping)]
        if told:
            yield self._of_loader(run, told)
            return
        together = _at_one_time([(p, e) for p in forked for e in p.of("file_shared")])
        if together:
            yield self._of_processes(together)

    def _of_loader(self, run: Run, told: list[tuple[int, Event, Mapping[str, object]]]) -> Finding:
        rank, event, file = told[0]
        opened = next((e for r, e in run.events("loader") if r == rank and e["loop"] == event["loop"]), None)
        made = next((w for s in (opened["made_dataset"] or ()) if (w := where_of(s)) is not None), None) if opened is not None else None
        return self.finding(
            f"{number(file.get('workers'))} loader workers read in one open file, `{file.get('name')}`: it has one position for all of them, which the seek of "
            "one moves under the read of another",
            where=where_of(file.get("site")) or made or event.where,
            ranks=replicas.rank_list([r for r, _, _ in told]),
            notes=["it was opened before the workers were forked: samples hold bytes of other samples, under their own labels"],
            help="open it in the worker, at its first sample (`if self.file is None: self.file = open(self.path, 'rb')`; if the "
            "parent reads one before, in worker_init_fn), or read with os.pread or mmap",
        )

    def _of_processes(self, told: list[tuple[Recording, Event]]) -> Finding:
        event = told[0][1]
        sharing = [p for p, e in told if e["key"] == event["key"]]
        name = f", `{event['name']}`" if event["name"] else ""
        return self.finding(
            f"{len(sharing)} forked processes read in one open file{name}: it has one position for all of them, which the seek of one moves under the "
            "read of another",
            where=where_of(event["made"]) or event.where,
            ranks=replicas.rank_list([max(p.rank, 0) for p, _ in told]),
            notes=["it was opened before they were forked: what one of them reads is what another one sought"],
            help="open it in each process, or read with os.pread or mmap",
        )


def _at_one_time(told: list[tuple[Recording, Event]]) -> list[tuple[Recording, Event]]:
    """Of the children that share a file: those that lived at the same time as another one of them."""
    return [(p, e) for p, e in told if any(q is not p and f["key"] == e["key"] and _overlap(p, q) for q, f in told)]


def _overlap(one: Recording, other: Recording) -> bool:
    (a, b), (c, d) = _life(one), _life(other)
    return a < d and c < b


def _life(process: Recording) -> tuple[int, int]:
    times = [e.t_ns for kind in ("start", "end", "file_shared") for e in process.of(kind)]
    return min(times), max(times)
