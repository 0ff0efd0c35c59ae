"""What a statement stands under that some ranks alone came to: a condition on the rank, an exception handler, a branch that asks for a rank's own data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.model import Where
from harness.record import Event, Run, where_of

BY_RANK = "call the collective on every rank: move it out of the rank-dependent branch"
BY_DATA = (
    "call the collective on every rank: move it out of the branch; where the branch asks for what a rank has of its own (its batch, its loss, its files), "
    "reduce the answer over all ranks first and branch on the result"
)
BY_EXCEPTION = (
    "a handler runs on the ranks that raised, a collective needs all: reduce a flag on every rank at every turn (`dist.all_reduce(failed)` behind the "
    "`try`), then let all ranks do the same by its result"
)
RANK = re.compile(
    r"(?<![a-z_])((local|global|world|node|my|proc|process|dist|ddp|dp)_)?rank(_?(id|idx|0|zero))?(?![a-z_])|get_(\w+_)?rank\b"
    r"|(is_|\b)(main|master|chief|primary|rank_?(0|zero))(_process|_proc|_rank)?\b",
    re.IGNORECASE,
)  # a process's: not `lora_rank`, `rank_loss`, `rerank`
UNKNOWN = "call the collective on every rank: no rank may pass it by"


@dataclass(frozen=True)
class Around:
    """The branch that most likely decided; `where` None: none is known around it."""

    where: Where | None
    help: str
    handler: bool = False

    @property
    def notes(self) -> list[str]:
        if self.where is None:
            return []
        return [f"it stands under `{self.where.text}` ({self.where.place})" + (", which a rank enters by an exception of its own" if self.handler else "")]


def around(run: Run, event: Event) -> Around:
    """Of the branches around a collective and around the calls that lead to it: the one on the rank, else the innermost. A handler farther out may be one
    that all ranks are in (nothing to resume from)."""
    told = next((e for _, e in run.events("coll_site") if e.where == event.where and e["op"] == event["op"]), None)
    ways = [w for w in (told["ways"] or ()) if isinstance(w, Mapping)] if told is not None else []
    branches = [w for way in ways if way.get("kind") == "branch" and (w := where_of(way.get("site"))) is not None]
    on_rank = next((w for w in branches if RANK.search(w.text)), None)
    if on_rank is not None:
        return Around(on_rank, BY_RANK)
    if branches and _is_handler(branches[0]):
        return Around(branches[0], BY_EXCEPTION, True)
    return Around(branches[0], BY_DATA) if branches else Around(None, UNKNOWN)


def _is_handler(where: Where) -> bool:
    return where.text.lstrip().startswith("except")
