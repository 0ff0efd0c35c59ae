"""Where ranks part in their training loops: one has left a loop that another goes on with. Shared by DAT111 and EVL103."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from harness import frames
from harness.checks.dat import partners, passes
from harness.checks.dat.passes import Pass
from harness.checks.hng import waits
from harness.checks.lau import blame
from harness.model import Where
from harness.probe import protocol
from harness.record import Event, Recording, Run, number, where_of

ABORT = -6
KILLED = (-6, -7, -9, -11)  # abort, bus error, kill, segmentation fault; a launcher ends the others of a failed gang with TERM


@dataclass(frozen=True)
class Parting:
    """`left` ended a loop (level 0: the one that steps; 1 and up: a loop around it) that `stayed` goes on with."""

    level: int
    left: tuple[int, ...]
    stayed: tuple[int, ...]
    exhausted: bool  # those who left had no batch left
    counts: tuple[int, ...]  # batches of the pass (level 0) or passes (level 1), a rank each
    loop: Where | None
    exits: tuple[Where, ...]  # statements that could have ended the loop
    may_skip: bool = False  # the loop has a `continue`
    made: Where | None = None
    inner: Where | None = None  # without loaders: the loop of the steps, where all loops around them are left
    ahead: bool = False  # without loaders: those who stayed have yet to come to where the others are


def find(run: Run) -> Parting | None:
    """The first parting of a run that did not end well or whose ranks took different numbers of steps; read once."""
    if "_parting" not in run.__dict__:
        found = _find(run)
        # ranks that train apart and all came to a good end have waited for nobody
        alone = found is not None and run.finished and partners.apart(run, found.left, found.stayed)
        run.__dict__["_parting"] = None if alone else found
    found = run.__dict__["_parting"]
    return found if isinstance(found, Parting) else None


def harmed(run: Run) -> bool:
    """Hung, failed, or steps that differ."""
    return not run.finished or len({r.num_steps for r in run.present}) > 1


def _find(run: Run) -> Parting | None:
    if run.live or len(run.present) < 2 or len(run.present) < run.world_size or not harmed(run):
        return None
    if len({sum(bool(e["done"]) for e in r.of("pg")) for r in run.present}) > 1:
        return None  # those that went on did so in a process group of their own
    table: dict[Any, dict[int, list[Pass]]] = {}
    for one in passes.all_passes(run):
        if one.trains or (one.closed is None and _trains_elsewhere(run, one)):
            table.setdefault(one.key, {}).setdefault(one.rank, []).append(one)
    for by_rank in table.values():
        found = _over_passes(run, by_rank)
        if found is not None:
            return found
    return None if table else _by_steps(run)


def _trains_elsewhere(run: Run, one: Pass) -> bool:
    return any(other.trains for other in passes.all_passes(run) if other.key == one.key)


def _over_passes(run: Run, by_rank: Mapping[int, list[Pass]]) -> Parting | None:
    if len(by_rank) < run.world_size:
        return None
    for nth in range(max(len(v) for v in by_rank.values())):
        here = {rank: v[nth] for rank, v in by_rank.items() if nth < len(v)}
        if len(here) < run.world_size:
            return _level_one(run, here, nth, by_rank)
        counts = {rank: p.num_batches for rank, p in here.items()}
        closed = {rank: p for rank, p in here.items() if p.closed is not None and not _failed_in(run, p)}
        if len(closed) == run.world_size and (len(set(counts.values())) == 1 or not any(_waits(run, p) for p in closed.values())):
            continue
        if not closed:
            return None
        fewest = min(counts[rank] for rank in closed)
        left = tuple(rank for rank in closed if counts[rank] == fewest)
        stayed = tuple(r for r in counts if r not in left and _goes_on(run, here[r], counts[r], fewest, left))
        if stayed:
            one = here[left[0]]
            sized = tuple(counts[r] if here[r].closed is not None else max(counts[r], 0) for r in sorted(counts))
            event = _loop_event(run, one.where)
            return Parting(0, left, stayed, all(here[r].exhausted for r in left), sized, one.where, *_exits(event, 0), one.made)
    return None


def _waits(run: Run, one: Pass) -> bool:
    """Whether a closed pass communicated: clients and local epochs may take as many steps as each has data for."""
    recording = run.ranks[one.rank]
    if recording is None or one.closed is None or number(one.closed["collectives"]) or recording.of("wrap"):
        return True
    if any(e["sharded"] for e in recording.of(protocol.PARAMS)):
        return True
    begin, end = one.opened.t_ns, one.closed.t_ns
    moved = {seq for t, seq in zip(recording.column("t_ns"), recording.column("seq"), strict=True) if begin <= t <= end}
    return len(moved) > 1


def _goes_on(run: Run, one: Pass, drawn: int, fewest: int, left: tuple[int, ...]) -> bool:
    """Whether a rank is in a pass that others have left after `fewest` batches. One cut off right there may have been about to leave."""
    if drawn > fewest:
        return True
    if one.closed is not None or drawn < fewest:
        return False
    return one.planned > fewest or (not one.planned and not any(_failed_before_the_others(run, r) for r in left))


def _level_one(run: Run, here: Mapping[int, Pass], nth: int, by_rank: Mapping[int, list[Pass]]) -> Parting | None:
    """Ranks that opened their n-th pass while others never did."""
    left = tuple(rank for rank in by_rank if rank not in here)
    if not here or not all(_is_behind(run, rank, by_rank[rank]) for rank in left):
        return None
    one = next(iter(here.values()))
    event = _loop_event(run, one.where)
    counts = tuple(len(by_rank[r]) for r in sorted(by_rank))
    lines, skip = _exits(event, 1)
    return Parting(1, left, tuple(sorted(here)), False, counts, one.where, lines, skip, one.made)


def _by_steps(run: Run) -> Parting | None:
    """No loaders: the loop around the optimizer's step is known from the source, and who is still inside it from the stacks."""
    events = [_step_loop(r) for r in run.present]
    ranges = [_ranges(e) for e in events]
    if not all(ranges):
        return None
    inside = {rank: _inside(run, rank, ranges[i][:1]) for i, rank in enumerate(run.rank_ids)}
    stuck = waits.stuck_alone(run)  # the others may have come back to the loop for the next epoch, and wait there
    left = tuple(r for r, v in inside.items() if v is False and r not in stuck and not _failed_before_the_others(run, r))
    stayed = tuple(r for i, (r, v) in enumerate(inside.items()) if v is True and not _came_round(run.ranks[r], ranges[i][0]))
    if not left or not stayed:
        return None
    around = any(_inside(run, r, ranges[i][1:]) for i, r in enumerate(run.rank_ids) if r in left) if len(ranges[0]) > 1 else False
    level = 0 if around or len(ranges[0]) == 1 else 1
    lines, skip = _exits(events[0], level)
    inner, inner_skip = _exits(events[0], 0)
    first = ranges[0][min(level, len(ranges[0]) - 1)]
    counts = tuple(max(r.num_steps, max((e.step for e in r.events), default=0)) for r in run.present)  # a step in the dark leaves no row
    ahead = not around and all(_comes_later(run, one, other) for one in left for other in stayed)
    ways = (*lines, *(inner if level else ()))
    return Parting(level, left, stayed, False, counts, _head(first), ways, skip or inner_skip, inner=_head(ranges[0][0]), ahead=ahead)


def _head(loop: Mapping[str, Any]) -> Where:
    return Where(str(loop["file"]), number(loop["first"]), str(loop["func"]))


def _comes_later(run: Run, left: int, stayed: int) -> bool:
    """Whether the one who left has ended, or is further down in the outermost function in which the two stand at other lines."""
    gone, still = run.ranks[left], run.ranks[stayed]
    if gone is None or still is None:
        return False
    if gone.of(protocol.END) and not gone.of(protocol.FAILURE):
        return True
    lines = {(PurePath(f.file).name, f.function): f.line for f in _last_frames(run, still)}
    for frame in reversed(_last_frames(run, gone)):
        line = lines.get((PurePath(frame.file).name, frame.function), frame.line)
        if line != frame.line:
            return line < frame.line
    return False


def _came_round(recording: Recording | None, loop: Mapping[str, Any]) -> bool:
    """Whether a rank has left the loop since its last step and is in it again: it was at a collective behind it."""
    if recording is None:
        return False
    since = [e.where for e in recording.of("coll") if e.step == recording.num_steps and e.where is not None]
    file = PurePath(str(loop.get("file"))).name
    return any(w.function == loop.get("func") and PurePath(w.file).name == file and w.line > number(loop.get("last")) for w in since)


def _step_loop(recording: Recording) -> Event | None:
    return next((e for e in recording.of("loop") if e["of"] == "step"), None)


def _loop_event(run: Run, where: Where | None) -> Event | None:
    return next((e for _, e in run.events("loop") if e["of"] == "loader" and where is not None and e.where == where), None)


def _ranges(event: Event | None) -> list[Mapping[str, Any]]:
    found = event["ranges"] if event is not None else None
    return [r for r in found if isinstance(r, Mapping)] if isinstance(found, list) else []


def _exits(event: Event | None, level: int) -> tuple[tuple[Where, ...], bool]:
    """(places where a loop of this level, or one further out, can be left; whether it has a `continue`)."""
    listed = event["exits"] if event is not None else None
    found: list[Where] = []
    skip = False
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, Mapping) or number(entry.get("level")) < level:
            continue
        if entry.get("kind") == "continue":
            skip = skip or entry.get("level") == level
        elif number(entry.get("level")) == level or (level and not found):
            place = where_of(entry.get("site"))
            if place is not None:
                found.append(place)
    return tuple(found), skip


def _failed_in(run: Run, one: Pass) -> bool:
    """The pass was closed by a failure of its own process."""
    recording = run.ranks[one.rank]
    failures = recording.of(protocol.FAILURE) if recording is not None else []
    return bool(failures) and one.closed is not None and not one.complete and failures[0].t_ns <= one.closed.t_ns


def _failed_before_the_others(run: Run, rank: int) -> bool:
    """This rank's own failure came first: it did not leave, it broke."""
    first = blame.culprit(run)
    if (
        first is not None
        and first.rank == rank
        and not first.victim
        and first.exit is not None
        and first.event is None
        and first.exit.code != ABORT
    ):
        return True  # an exit code of its own or a signal, without an exception; gloo aborts where collectives do not fit
    if first is not None and first.rank != rank and blame.no_fit(run):
        return False  # it lost the connection to the one that gloo aborted
    times = {r: rec.of(protocol.FAILURE)[0].t_ns for r, rec in enumerate(run.ranks) if rec is not None and rec.of(protocol.FAILURE)}
    return rank in times and times[rank] == min(times.values())


def _is_behind(run: Run, rank: int, own: list[Pass]) -> bool:
    """Whether a rank that opened no further pass has left the loop around them: it is known to be elsewhere, and was not killed."""
    ends = [e for e in run.ending.exits if e.rank == rank and e.code in KILLED and not e.by_us]
    killed = run.ending.reason == "exited" and bool(ends) and not (ends[0].code == ABORT and _in_collective(run, rank))
    if killed or _failed_before_the_others(run, rank):
        return False
    return _inside(run, rank, _ranges(_loop_event(run, own[-1].where))[1:]) is False


def _in_collective(run: Run, rank: int) -> bool:
    """Whether the last thing that a rank told is a collective: gloo aborts where it meets another one of the peers."""
    recording = run.ranks[rank]
    last = [e.kind for e in recording.events[-2:]] if recording is not None else []
    return "coll" in (last if last[-1:] == ["coll_site"] else last[-1:])  # where a new call site is told, it follows


def _inside(run: Run, rank: int, ranges: list[Mapping[str, Any]]) -> bool | None:
    """Whether a rank's last known stack lies in one of these loops; None where nothing is known of it."""
    recording = run.ranks[rank]
    if recording is None:
        return None
    ended = recording.of(protocol.END)
    if ended and not recording.of(protocol.FAILURE):
        return False
    seen = _last_frames(run, recording)
    if not seen or (len(seen) == 1 and not any(seen[0].function == r.get("func") for r in ranges)):
        return None  # a last collective inside a helper does not say where the helper was called
    return any(
        PurePath(f.file).name == PurePath(str(r.get("file"))).name
        and number(r.get("first")) <= f.line <= number(r.get("last"))
        for f in seen
        for r in ranges
    )


def _last_frames(run: Run, recording: Recording) -> list[Where]:
    """Frames of the main thread where it was seen last: stacks on request, a stall, its failure, or its last collective."""
    for stacks in run.ending.stacks:
        if stacks.rank == recording.rank:
            for name, stack in stacks.threads.items():
                if "main" in name.lower():
                    return list(stack)
    if dump := frames.dumped(run.logs.get(recording.rank, "")):
        return dump
    candidates: list[tuple[int, list[Where]]] = []
    for kind, key in (("stall", "stack"), (protocol.FAILURE, "frames")):
        for event in recording.of(kind)[-1:]:
            seen = [w for s in event[key] or () if (w := where_of(s)) is not None]
            candidates.append((event.t_ns, seen))
    for event in recording.of("coll")[-1:]:
        if event.where is not None:
            candidates.append((event.t_ns, [event.where]))
    return max(candidates, key=lambda c: c[0])[1] if candidates else []
