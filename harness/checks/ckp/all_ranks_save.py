"""CKP101 all-ranks-save-same-path: several ranks save to one path at the same time.

What it does
    Compares the real paths that the ranks give to `torch.save` (or rename their temporary file to) between two synchronisations.

Why it is bad
    `torch.save` does not write at once. Two writers leave a file that cannot be read, or one that mixes both and loads: of 20 tries one was
    unreadable and one was a mixture. With 64 ranks the file system pays for 64 copies as well.

Wrong
    torch.save(model.state_dict(), "model.pt")

Right
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.barrier()            # before anybody reads it

Known limits
    Ranks on different nodes may each have a disk of their own under one path: only ranks of one node are compared. Ranks that take turns,
    with a barrier in between, are silent. Files that are not written by torch.save are OUT103's.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.ckp import files
from harness.checks.order import Clocks
from harness.model import Finding, Severity
from harness.record import Run


class AllRanksSaveSamePath(Check):
    code = "CKP101"
    name = "all-ranks-save-same-path"
    severity = Severity.ERROR
    explains = ("CKP112",)

    def end(self, run: Run) -> Iterable[Finding]:
        saves = files.saves(run)
        if len(run.present) < 2 or not saves:
            raise NotApplicable("one rank" if saves else "nothing is saved with torch.save")
        clocks = Clocks(run)
        by_path: dict[str, list[files.Save]] = {}
        for save in saves:
            by_path.setdefault(save.path, []).append(save)
        together = {path: found for path, group in by_path.items() if (found := at_once(clocks, group))}
        if together and not clocks.reliable:
            raise Inconclusive("the ranks counted different numbers of collectives, so their saves cannot be put in order")
        yield from self._grouped(together)

    def _grouped(self, together: dict[str, list[files.Save]]) -> Iterable[Finding]:
        """One finding a statement: it is one mistake, however many files it makes."""
        by_site: dict[tuple[str, int], list[files.Save]] = {}
        for group in together.values():
            where = group[0].begin.where
            by_site.setdefault((where.file, where.line) if where else ("", 0), []).extend(group)
        for group in by_site.values():
            ranks = sorted({s.rank for s in group})
            path = group[0].path
            first = [s for s in group if s.path == path]
            own_temporary = all(s.atomic for s in group) and len({s.written for s in first}) == len({s.rank for s in first})
            num_files = len({s.path for s in group})
            yield self.finding(
                f"{len(ranks)} ranks save to {files.name(path)} at the same time",
                where=group[0].begin.where,
                ranks=ranks,
                notes=[
                    f"{len(group)} saves of {num_files} file{'s' if num_files > 1 else ''}, the first {files.short(path)}",
                    "each rank renames a file of its own to it: never half a file, but that of the last rank"
                    if own_temporary
                    else "two writers at once leave an unreadable file, or one that mixes both ranks and loads",
                ],
                help="what is equal on all ranks: save under `if rank == 0:` and call `dist.barrier()` before another rank reads the file; "
                'what each rank has of its own: put the rank into the name, `f"part_{rank}.pt"`',
                severity=Severity.WARNING if own_temporary else None,
                evidence={"path": path, "saves": len(group)},
            )


def at_once(clocks: Clocks, saves: list[files.Save]) -> list[files.Save]:
    """The saves of one path that another rank's save overlaps: nothing orders the two."""
    moments: dict[int, list[files.Save]] = {}
    for save in saves:
        moments.setdefault(clocks.at(save.rank, save.begin), []).append(save)
    found: list[files.Save] = []
    for group in moments.values():
        for save in group:
            others = [o for o in group if o.rank != save.rank and clocks.same_host(o.rank, save.rank)]
            if any(clocks.unordered(save.rank, save.begin, o.rank, o.begin) for o in others):
                found.append(save)
    return found
