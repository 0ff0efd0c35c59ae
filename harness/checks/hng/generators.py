"""A rank that left a loop over a generator early: what the generator would still have called, the other ranks wait in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from harness import frames
from harness.checks.dat import passes
from harness.checks.hng import waits
from harness.checks.lau import blame
from harness.model import Where
from harness.probe import protocol
from harness.record import Run, where_of


@dataclass(frozen=True)
class Consumer:
    """The loop over the generator that a rank waits in."""

    name: str  # of the generator
    loop: Where
    exits: tuple[Where, ...]
    left: tuple[int, ...]  # ranks that are known to have left it before its end
    after: str = ""  # how far the first of them came

    @property
    def where(self) -> Where:
        return self.exits[0] if len(self.exits) == 1 else self.loop

    @property
    def note(self) -> str:
        ways = ", ".join(f"`{w.text}` ({w.place})" for w in self.exits)
        can = f", which {ways} can leave" if ways else ""
        return f"{self.name} is drawn from by the loop at {self.loop.place}{can}" + (f"; {blame.plural(list(self.left))} left it {self.after}" if self.left else "")


def find(run: Run, waiting: Sequence[waits.Wait], odd: waits.Wait, header: Where) -> Consumer | None:
    """`header`: the loop inside the generator that holds the collective which the odd one waits in."""
    recording = run.ranks[odd.rank]
    told = [e for kind in ("stall", protocol.FAILURE) for e in (recording.of(kind) if recording is not None else ()) if e["op"] == odd.op]
    given = told[-1]["consumer"] if told and _same(told[-1].where, odd.where) else _dumped(run, odd)
    loop = where_of(given.get("loop")) if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or loop is None:
        return None
    exits = tuple(w for s in given.get("exits") or () if (w := where_of(s)) is not None)
    left, after = _left(run, {w.rank for w in waiting if _same(w.where, odd.where)}, header)
    return Consumer(str(given.get("name")), loop, exits, tuple(left), after)


def _dumped(run: Run, odd: waits.Wait) -> Mapping[str, Any] | None:
    """Of a rank that gloo aborted there is only the stack in its log: behind the generator's frame stands the one that draws from it."""
    if not any(e["yields"] for _, e in run.events("coll_site") if _same(e.where, odd.where)):
        return None
    stack = [f for f in frames.dumped_whole(run.logs.get(odd.rank, "")) if frames.is_users(f.file)]
    caller = next((f for one, f in pairwise(stack) if _same(one, odd.where)), None)
    name = odd.where.function if odd.where is not None else ""
    return {"loop": asdict(caller) | {"func": caller.function}, "name": name} if caller is not None else None


def _same(one: Where | None, other: Where | None) -> bool:
    return one is not None and other is not None and (one.file, one.line) == (other.file, other.line)


def _left(run: Run, inside: set[int], header: Where) -> tuple[list[int], str]:
    """Ranks that gave up that pass over a data loader in the generator's own loop which others are in, and how far the first of them came."""
    made = {rank: [p for p in passes.of_recording(rank, r) if _same(p.where, header)] for rank, r in enumerate(run.ranks) if r is not None}
    nth = {len(own) for rank, own in made.items() if rank in inside}
    gave_up = {r: own[-1] for r, own in made.items() if r not in inside and {len(own)} == nth and own and own[-1].closed is not None and not own[-1].exhausted}
    if not gave_up:
        return [], ""
    first = next(iter(gave_up.values()))
    return list(gave_up), f"after {first.num_batches}{f' of {first.planned}' if first.planned else ''} batches"
