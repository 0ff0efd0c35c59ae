"""Permutations that the script draws on every rank, and how much of them each rank trains on before the next: shared by DAT121 and DAT122."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.checks.dat import together
from harness.model import Where
from harness.record import Event, Run, number, where_of


@dataclass(frozen=True)
class Drawn:
    """The calls of one statement, a list a rank, in order."""

    calls: tuple[list[Event], ...]
    where: Where | None

    @property
    def num_common(self) -> int:
        return min(map(len, self.calls))

    @property
    def size(self) -> int:
        return number(self.calls[0][0]["num"])

    @property
    def own_generator(self) -> bool:
        return any(e["generator"] for calls in self.calls for e in calls)

    @property
    def cut(self) -> Where | None:
        """The statement that takes a part of it."""
        return next((w for calls in self.calls for e in calls if (w := where_of(e["cut"])) is not None), None)

    def digests(self, k: int) -> list[Any]:
        return [calls[k]["digest"] for calls in self.calls]

    def steps(self, k: int) -> list[int]:
        return [calls[k].step for calls in self.calls]


def of(run: Run) -> list[Drawn]:
    """Those that every rank draws at least twice, always of one length."""
    tables: list[dict[tuple[str, int, str], list[Event]]] = []
    for recording in run.present:
        table: dict[tuple[str, int, str], list[Event]] = {}
        for e in recording.of("permuted"):
            if e.where is not None and e["digest"]:
                table.setdefault((e.where.file, e.where.line, str(e["fn"])), []).append(e)
        tables.append(table)
    common = set(tables[0]).intersection(*tables[1:]) if tables else set()
    found = [Drawn(tuple(t[key] for t in tables), tables[0][key][0].where) for key in sorted(common)]
    return [d for d in found if d.num_common >= 2 and len({number(e["num"]) for calls in d.calls for e in calls}) == 1]


def is_shared_out(run: Run, drawn: Drawn) -> bool:
    """Whether each rank trains on about its share of it between two calls, counted in samples or in batches, and not on all of it; not where a
    DistributedSampler deals the data out: such a permutation is for something else."""
    if any(isinstance(e["distributed"], dict) for _, e in run.events("loader")):
        return False
    ends = [*range(1, drawn.num_common)]
    return any(all(_is_share(run, drawn, rank, k) for rank in range(len(drawn.calls))) for k in ends) or (
        run.finished and all(_is_share(run, drawn, rank, drawn.num_common) for rank in range(len(drawn.calls)))
    )


def _is_share(run: Run, drawn: Drawn, rank: int, k: int) -> bool:
    """Of the steps between the calls k-1 and k of a rank."""
    calls, recording = drawn.calls[rank], run.present[rank]
    start, end = calls[k - 1].step, calls[k].step if k < len(calls) else recording.num_steps
    backwards: int = sum(n for s, n in zip(recording.column("step"), recording.column("num_backward"), strict=True) if start <= s < end)
    share, rows = drawn.size / len(drawn.calls), together.rows_fed(run, rank)
    by_rows: bool = rows > 0 and share - 2 * rows <= backwards * rows <= min(share + rows, 0.75 * drawn.size)
    by_batches: bool = backwards > 1 and share - 1 <= backwards <= min(share + 1, 0.75 * drawn.size)
    return by_batches or (backwards > 0 and by_rows)


def listed(texts: Sequence[str], limit: int = 3) -> list[str]:
    return [*texts[:limit], *([f"and {len(texts) - limit} more"] if len(texts) > limit else [])]
