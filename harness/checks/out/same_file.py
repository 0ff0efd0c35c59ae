"""OUT103 every-rank-writes-output: several ranks open one file for writing, or each makes a run folder of its own by its own clock.

What it does
    Compares the real paths that the ranks open for writing between two synchronisations, and the folders that they make at one statement.

Why it is bad
    A log with a row a rank, in changing order, from processes that overwrite each other; on a network file system, rows that vanish. A file that all
    write under one temporary name and rename: what takes its place may be half written, and the second rank finds nothing to rename. A
    folder named after the time of day is another one on each rank: checkpoints and logs of one run lie in several places.

Wrong
    with open("metrics.csv", "a") as f: ...                        # on every rank
    run_dir = time.strftime("runs/%Y%m%d-%H%M%S")                  # on every rank

Right
    if rank == 0:
        with open("metrics.csv", "a") as f: ...
    box = [time.strftime("runs/%Y%m%d-%H%M%S")]
    dist.broadcast_object_list(box, src=0)                         # one name for all

Known limits
    Silent on files opened exclusively or under a file lock, in-place updates (`r+`), caches in the home folder, and ranks that take turns
    with a barrier. Ranks on different nodes are not compared. Files of torch.save are CKP101's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.ckp import files
from harness.checks.order import Clocks
from harness.checks.out import folders, taken
from harness.model import Finding, Severity
from harness.record import Event, Run

Writer = tuple[int, Event]


class EveryRankWritesOutput(Check):
    code = "OUT103"
    name = "every-rank-writes-output"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        if len(run.present) < 2:
            raise NotApplicable("one rank")
        opened, renamed = _writers(run), _renamers(run)
        if not opened and not renamed and not any(True for _ in run.events("mkdir")):
            raise NotApplicable("no file is written")
        clocks = Clocks(run)
        together = {path: found for path, group in opened.items() if (found := _unordered(clocks, group))}
        if together and not clocks.reliable:
            raise Inconclusive("the ranks counted different numbers of collectives, so what they write cannot be put in order")
        yield from self._files(run, together)
        for path, group in renamed.items():
            if path not in together and (found := _unordered(clocks, group)) and not any(e["src"] in together for _, e in found):
                yield self._replaced(run, path, found)
        yield from (self._apart(apart) for apart in folders.apart(run, clocks))

    def _files(self, run: Run, together: dict[str, list[Writer]]) -> Iterable[Finding]:
        by_site: dict[tuple[str, int], dict[str, list[Writer]]] = {}
        for path, group in together.items():
            where = group[0][1].where
            by_site.setdefault((where.file, where.line) if where else ("", 0), {})[path] = group
        for paths in by_site.values():
            gone = taken.find(run, paths)
            path = gone.path if gone is not None else next(iter(paths))
            group = paths[path]
            ranks = sorted({rank for found in paths.values() for rank, _ in found})
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            opened = f" at line {group[0][1].where.line}" if gone is not None and group[0][1].where else ""
            yield self.finding(
                f"{len(ranks)} ranks write to {files.name(path)}{more} at the same time{_fell(gone)}",
                where=(gone.where if gone is not None else None) or group[0][1].where,
                ranks=ranks,
                notes=[
                    f"{len(group)} opens of {files.short(path)}{opened}",
                    "every rank appends its own rows, in changing order"
                    if group[0][1]["mode"] == "a"
                    else "each open empties the file under the other writer",
                    *([gone.note] if gone is not None else _renamed_after(run, path)),
                ],
                help="write under `if rank == 0:`, after reducing the numbers over all ranks; or give each rank a file of its own"
                if gone is None
                else "make the file under `if rank == 0:` and let the others wait at a barrier; or give each rank a temporary name of its own",
                severity=Severity.ERROR if gone is not None else None,
                evidence={"path": path, "opens": len(group)},
                folds=taken.FOLLOWS if gone is not None else (),
            )

    def _replaced(self, run: Run, path: str, group: Sequence[Writer]) -> Finding:
        sources = {str(e["src"]) for _, e in group}
        one = next(iter(sources)) if len(sources) == 1 else ""
        gone = taken.find(run, [one]) if one else None
        ranks = sorted({rank for rank, _ in group})
        return self.finding(
            f"{len(ranks)} ranks rename {files.name(one)} to {files.name(path)}, which only the first can{_fell(gone)}"
            if one
            else f"{len(ranks)} ranks make {files.name(path)}, each renames its own copy over it",
            where=group[0][1].where,
            ranks=ranks,
            notes=[gone.note] if gone is not None else [] if one else ["the file is never half written, the work is done once a rank"],
            help="make it under `if rank == 0:` and let the others wait at a barrier",
            severity=Severity.ERROR if gone is not None else Severity.ADVICE,
            folds=taken.FOLLOWS if gone is not None else (),
        )

    def _apart(self, apart: folders.Apart) -> Finding:
        names = ", ".join(f"{files.name(p)} (rank {r})" for r, p in list(apart.paths.items())[:3])
        what = "run folders" if apart.kind == "mkdir" else "files"
        return self.finding(
            f"{len(set(apart.paths.values()))} {what} for one run: each rank names its own by its clock or at random",
            where=apart.where,
            ranks=sorted(apart.paths),
            notes=[names],
            help="make the name on rank 0 and send it to all with `dist.broadcast_object_list`",
            severity=None if apart.kind == "mkdir" else Severity.ADVICE,
            evidence={"paths": {str(r): p for r, p in apart.paths.items()}},
        )


def _writers(run: Run) -> dict[str, list[Writer]]:
    saved = {str(e["path"]) for _, e in run.events("save")}
    found: dict[str, list[Writer]] = {}
    for rank, event in run.events("open"):
        path = str(event["path"] or "")
        if event["mode"] in ("w", "a") and not event["locks"] and path not in saved and not path.endswith((".lock", ".lck")):
            found.setdefault(path, []).append((rank, event))
    return {path: group for path, group in found.items() if len({rank for rank, _ in group}) > 1}


def _renamers(run: Run) -> dict[str, list[Writer]]:
    saved = {str(e["path"]) for _, e in run.events("save")}
    found: dict[str, list[Writer]] = {}
    for rank, event in run.events("rename"):
        if event["src"] not in saved:
            found.setdefault(str(event["dst"]), []).append((rank, event))
    return {path: group for path, group in found.items() if len({rank for rank, _ in group}) > 1}


def _fell(gone: taken.Taken | None) -> str:
    return f", and rank {gone.rank} failed for it" if gone is not None else ""


def _renamed_after(run: Run, path: str) -> list[str]:
    """The name under which each rank then puts the file that all of them write."""
    done = [(rank, e) for rank, e in run.events("rename") if e["src"] == path]
    if len({rank for rank, _ in done}) < 2:
        return []
    return [f"each then renames it to {files.name(str(done[0][1]['dst']))}: the one may be half written, and the rank that comes second may find nothing"]


def _unordered(clocks: Clocks, group: Sequence[Writer]) -> list[Writer]:
    """The opens that another rank's open of the same file may overlap."""
    moments: dict[int, list[Writer]] = {}
    for rank, event in group:
        moments.setdefault(clocks.at(rank, event), []).append((rank, event))
    return [
        (rank, event)
        for found in moments.values()
        for rank, event in found
        if any(o != rank and clocks.same_host(o, rank) and clocks.unordered(rank, event, o, other) for o, other in found)
    ]
