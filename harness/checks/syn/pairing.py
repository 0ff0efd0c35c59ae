"""How the ranks' collectives pair up. The n-th collective of the default group on one rank meets the n-th of every other rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.checks.base import NotApplicable
from harness.checks.hng import waits as hng
from harness.model import Where
from harness.probe import protocol
from harness.record import Event, Run, where_of

SIZED = {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", *protocol.GATHER_INTO, *protocol.REDUCE_SCATTER_INTO}
MAX_EVENTS = 3000  # what a recording keeps


@dataclass(frozen=True)
class Pairing:
    """The collectives of every present rank, in order."""

    ranks: tuple[int, ...]
    columns: tuple[Sequence[Event], ...]

    @property
    def shortest(self) -> int:
        return min(len(c) for c in self.columns)

    def at(self, n: int) -> list[Event]:
        return [c[n] for c in self.columns]

    @cached_property
    def issuers(self) -> dict[tuple[str, int], list[int]]:
        """Statement -> ranks that ever issued a collective from it."""
        table: dict[tuple[str, int], list[int]] = {}
        for rank, column in zip(self.ranks, self.columns, strict=True):
            for key in {site_key(e) for e in column}:
                table.setdefault(key, []).append(rank)
        return table


def of(run: Run) -> Pairing:
    """NotApplicable where there is nothing to pair. Computed once for all checks of one judgement."""
    found = run.__dict__.get("_pairing")
    if not isinstance(found, Pairing):
        found = run.__dict__["_pairing"] = _read(run)
    return found


def _read(run: Run) -> Pairing:
    if run.world_size < 2:
        raise NotApplicable("one process")
    ranks = [rank for rank, r in enumerate(run.ranks) if r is not None]
    columns = [[e for e in run.ranks[rank].of("coll") if e["world"] is not False and e["op"] not in protocol.POINT_TO_POINT] for rank in ranks]  # type: ignore[union-attr]
    if len(ranks) < 2 or not any(columns):
        raise NotApplicable("the script calls no collective itself")
    return Pairing(tuple(ranks), tuple(columns))


def site_key(event: Event) -> tuple[str, int]:
    where = event.where
    return (where.file.rsplit("/", 1)[-1], where.line) if where else ("", 0)


def only_on(pairing: Pairing, event: Event) -> list[int]:
    """Ranks that ever issued a collective from the statement of `event`."""
    return pairing.issuers.get(site_key(event), [])


def passed_by(run: Run, pairs: Pairing, ranks: Sequence[int], event: Event, n: int) -> bool:
    """Whether the ranks that lack this n-th collective went past it: they issued another as their n-th, stepped, or ended; or all stand still, or
    they are in a gradient all-reduce that met this collective and broke the run."""
    broke = hng.broken(run)
    for rank in ranks:
        recording = run.ranks[rank]
        if recording is None or recording.num_steps < event.step:
            return False
        other = len(pairs.columns[pairs.ranks.index(rank)]) > n
        beyond = other or recording.num_steps > event.step or recording.of(protocol.END) or _in_backward(broke, rank)
        if not beyond and run.ending.reason != "hang":
            return False
    return True


def _in_backward(found: Sequence[hng.Wait], rank: int) -> bool:
    return any(w.rank == rank and w.op == "backward" for w in found)


def _alike(one: Event, other: Event) -> bool:
    """Whether two calls can be meant for each other. A tensor of another dtype or of another size is a mistake; of both, another call."""
    return bool(one["op"] == other["op"] and (one["dtype"] == other["dtype"] or one["numel"] == other["numel"]))


MAX_ROUND = 200  # calls of one step that are looked through for a tensor of a name
WINDOW = 8  # calls within which a swapped partner is looked for


def _own(event: Event, other: Event) -> frozenset[str]:
    """What tells the tensor of `event` from that of `other`: its names in the calling code, else the text of the call, else its line."""
    mine, theirs = set(event["names"] or ()), set(other["names"] or ())
    if mine - theirs and theirs - mine:
        return frozenset(mine - theirs)
    if event.where and other.where and event.where.text and other.where.text and event.where.text != other.where.text:
        return frozenset([event.where.text])
    return frozenset([f"line {site_key(event)[1]}"])


def swapped_with(one: Sequence[Event], other: Sequence[Event], n: int) -> int | None:
    """The later call at which the two tensors that meet at call n meet the other way round, or, where the calling code has names for both, at
    which the second of them has come up on the other rank, in the same step; None where they belong together."""
    if _of_hook(one[n]) or _of_hook(other[n]):
        return None
    a, b = _own(one[n], other[n]), _own(other[n], one[n])
    if a == b:
        return None
    named = bool(a & set(one[n]["names"] or ()) and b & set(other[n]["names"] or ()))
    if named:
        later = [_comes(other, n, a), _comes(one, n, b)]
        return max(m for m in later if m is not None) if None not in later else None
    for m in range(n + 1, min(n + 1 + WINDOW, len(one), len(other))):
        if one[m]["op"] != one[n]["op"]:
            return None
        if _own(one[m], other[m]) == b and _own(other[m], one[m]) == a:
            return m
    return None


def _comes(column: Sequence[Event], n: int, names: frozenset[str]) -> int | None:
    """The next call of this step that is given a tensor of these names. A string that each rank draws anew at every step is no tensor's name."""
    for m in range(n + 1, min(n + 1 + MAX_ROUND, len(column))):
        if column[m]["op"] != column[n]["op"] or column[m].step != column[n].step:
            return None
        if names <= set(column[m]["names"] or ()):
            return m
    return None


def _of_hook(event: Event) -> bool:
    """Issued for DDP's communication hook, or by a future's callback in another thread: no statement of the user's, the moment sets the line."""
    return bool(event["hook"]) or event.where is None


def called(one: Event, other: Event) -> tuple[str, str]:
    return ", ".join(sorted(_own(one, other))), ", ".join(sorted(_own(other, one)))


@dataclass(frozen=True)
class Lone:
    """A collective that a strict subset of the ranks issues, and without which the ranks' sequences would fit."""

    event: Event
    n: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]


def lone(run: Run, pairs: Pairing) -> Lone | None:
    """The first such collective. A rooted one whose counterpart stands on another line is none."""
    for column in pairs.columns:
        for n, event in enumerate(column):
            if _of_hook(event):
                continue
            only = only_on(pairs, event)
            if len(only) == len(pairs.ranks):
                continue
            on = set(only)
            missing = [r for r in pairs.ranks if r not in on]
            others = [c for r, c in zip(pairs.ranks, pairs.columns, strict=True) if r not in on]
            if all(len(c) > n and _alike(c[n], event) and not _shifts(column, c, n) for c in others):
                continue  # the same operation from a line of their own: an if/else around one collective
            if passed_by(run, pairs, missing, event, n):
                return Lone(event, n, tuple(only), tuple(missing))
    return None


def _shifts(column: Sequence[Event], other: Sequence[Event], n: int) -> bool:
    """Whether the other rank is one call ahead from here on: what it issues as its n-th, this one issues as its next."""
    return len(column) > n + 1 and site_key(other[n]) == site_key(column[n + 1])


def missed_at(run: Run, event: Event) -> Where | None:
    """The way out by which ranks can have missed a collective: the one `return`, `continue` or `break` before it, where no branch around it, or
    around the calls that lead to it, could have done so too."""
    told = next((e for _, e in run.events("coll_site") if e.where == event.where and e["op"] == event["op"]), None)
    ways = [w for w in (told["ways"] or ()) if isinstance(w, Mapping)] if told is not None else []
    return where_of(ways[0].get("site")) if len(ways) == 1 and ways[0].get("kind") == "exit" else None
