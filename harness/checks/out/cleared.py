"""OUT107 folder-cleared-by-several-ranks: a rank removes a folder or file that another rank makes or fills, and nothing orders the two.

What it does
    Compares the real paths that a rank removes (`shutil.rmtree`, `os.remove`, `os.rmdir`) with what the other ranks make and write there
    between the same two synchronisations. Where a rank fell at a removal of something that another rank removed too, that is the cause.

Why it is bad
    Each rank clears the run folder and makes it anew: the slower one deletes what the faster one has written, or fails because the folder
    goes away under it. Whether it does is a matter of luck.

Wrong
    shutil.rmtree(out, ignore_errors=True)                         # on every rank
    os.makedirs(out)

Right
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
        os.makedirs(out)
    dist.barrier()

Known limits
    Silent on what is private to a rank, on removals under a file lock, and on clearing up at the end, when nothing is made there any more.
    Ranks on different nodes are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.ckp import files
from harness.checks.order import Clocks
from harness.model import Finding, Severity
from harness.record import Event, Run

Act = tuple[int, Event]  # (rank, what it did)
GONE = ("FileNotFoundError", "OSError", "NotADirectoryError")


class FolderClearedBySeveralRanks(Check):
    code = "OUT107"
    name = "folder-cleared-by-several-ranks"
    severity = Severity.WARNING
    explains = ("LAU101", "LAU102", "LAU122", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        if len(run.present) < 2:
            raise NotApplicable("one rank")
        removed = [(rank, e) for rank, e in run.events("remove") if e["path"] and not e["locks"]]
        if not removed:
            raise NotApplicable("no rank removes a folder or file")
        clocks = Clocks(run)
        used = [(rank, e) for kind in ("mkdir", "open", "save") for rank, e in run.events(kind) if kind != "open" or e["mode"] in ("w", "a", "x")]
        told: set[tuple[str, int]] = set()
        for rank, event in removed:
            where = event.where
            key = (where.file, where.line) if where else ("", 0)
            users = [a for a in used if _inside(str(a[1]["path"] or ""), str(event["path"])) and _together(clocks, (rank, event), a)]
            fell = _fell(run, clocks, (rank, event), removed)
            if key in told or not (users or fell):
                continue
            if not clocks.reliable and not fell:
                raise Inconclusive("the ranks counted different numbers of collectives, so what they remove and make cannot be put in order")
            told.add(key)
            others = {r for r, e in removed if e["path"] == event["path"] and e.where == where}
            yield self._found((rank, event), sorted({rank, *others}), users, fell)

    def _found(self, removal: Act, removers: Sequence[int], users: Sequence[Act], fell: str) -> Finding:
        rank, event = removal
        path = str(event["path"])
        notes = [f"the removal failed: {fell}"] if fell else []
        if users:
            other, use = users[0]
            does = {"mkdir": "makes", "open": "writes", "save": "saves"}[use.kind]
            line = f" at line {use.where.line}" if use.where else ""
            notes.append(f"rank {other} {does} {files.short(str(use['path']))}{line}; no synchronisation lies between that and rank {rank}'s removal")
        what = (
            f"{len(removers)} ranks remove {files.short(path)}: what one of them makes there, another may delete"
            if len(removers) > 1
            else f"rank {rank} removes {files.short(path)} while rank {users[0][0] if users else '?'} makes or writes it"
        )
        return self.finding(
            what,
            where=event.where,
            ranks=removers,
            notes=notes,
            help="clear and make it under `if rank == 0:`, and let the others wait at `dist.barrier()`",
            severity=Severity.ERROR if fell else None,
            evidence={"path": path},
        )


def _inside(path: str, removed: str) -> bool:
    return path == removed or path.startswith(removed.rstrip("/") + "/")


def _together(clocks: Clocks, removal: Act, use: Act) -> bool:
    return removal[0] != use[0] and clocks.same_host(removal[0], use[0]) and clocks.unordered(removal[0], removal[1], use[0], use[1])


def _fell(run: Run, clocks: Clocks, removal: Act, removed: Sequence[Act]) -> str:
    """What this rank raised at this very line, where another rank removes the same; "" if it did not."""
    rank, event = removal
    recording = run.ranks[rank]
    twice = any(e["path"] == event["path"] and _together(clocks, removal, (r, e)) for r, e in removed)
    if recording is None or not twice or event.where is None:
        return ""
    for failure in recording.of("failure"):
        frames = failure["frames"] if isinstance(failure["frames"], list) else []
        lines = {(f.get("file"), f.get("line")) for f in frames if isinstance(f, dict)}
        if failure["type"] in GONE and (event.where.file, event.where.line) in lines:
            return f"{failure['type']}: {str(failure['message'])[:120]}"
    return ""
