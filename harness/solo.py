"""Takes out of the ranks' recordings the steps that some of them make for themselves, so that step n is the same step on every rank.

A learning-rate range test on rank 0 before the training, a linear probe that rank 0 fits after each epoch: such steps belong to an optimizer
that only those ranks have. So do those of a search before DDP wraps anything, where the ranks come out of it after steps of their own number (five
members, or folds, over two ranks), and of one between or beside steps that the ranks share, where they have other numbers of members. Their rows are
dropped, with what was told of them and the passes over their loaders, and the others are numbered anew, optimizers too. What a rank takes at some of its
own steps only (protocol.witnessed) is then compared where all ranks took it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from harness.probe import protocol

if TYPE_CHECKING:
    from harness.record import Event, Recording

Apart = list[tuple["Recording", set[int], "Event | None"]]  # a rank each: its solo optimizers, and DDP's first wrap where all their steps come before it

STEP_FIELDS = ("at", "steps_now")  # fields of events that count the process's steps, beside the event's own
PASSES = ("loader", "pass")
TOLD_A_STEP = ("loss", "draw", "gradients", "accumulation")
WITNESS = ("grad", "param", "full", "none", "train", "hyper", "indices", "batch", "coll", "buffer")  # digests of witnessed steps
BY_STEP = ("full", "draws")  # what they are taken of depends on the step's number


def without(ranks: Sequence[Recording | None]) -> list[Recording | None]:
    """The recordings as they are, unless every rank has an optimizer that all have, with steps, and some have another one besides."""
    apart = _before_wrapping(ranks) or _dealt_out(ranks) or _of_some(ranks)
    if not apart:
        return list(ranks)
    return [*_comparable([_trimmed(recording, solo, wrapped) if solo else recording for recording, solo, wrapped in apart])]


def _before_wrapping(ranks: Sequence[Recording | None]) -> Apart:
    """A rank each, the optimizers whose steps all come before DDP's first wrap; nothing where the ranks wrap at the same step, as they do mostly."""
    told = [(r, e) for r in ranks if r is not None and (e := next(iter(r.of("wrapping")), None)) is not None]
    if len(told) < len(ranks) or len({e.step for _, e in told}) < 2:
        return []
    found = [(r, *_split(r, e.step), e) for r, e in told]
    if all(len(before) == 1 for _, before, *_ in found) and len({repr(e["each"]) for _, e in told}) > 1:
        return []  # each rank wraps what it has warmed up alone: no members, the wrap came too late
    return [] if any(before & after or not after for _, before, after, _ in found) else [(r, before, e) for r, before, _, e in found]


def _dealt_out(ranks: Sequence[Recording | None]) -> Apart:
    """A rank each, the optimizers that share nothing, where the ranks have other numbers of them and take as many steps with all others."""
    found = [(r, *_by_sharing(r)) for r in ranks if r is not None]
    if len(found) < len(ranks) or len(found) < 2 or len({len(alone) for _, alone, _ in found}) == 1:
        return []
    rest = {sum(opt not in alone for opt in r.column("opt")) for r, alone, _ in found}
    return [(r, alone, None) for r, alone, _ in found] if all(sure for *_, sure in found) and len(rest) == 1 and min(rest) else []


def _of_some(ranks: Sequence[Recording | None]) -> Apart:
    """A rank each, the optimizers that were made by statements that some other rank never ran."""
    made = [_made(r) for r in ranks if r is not None]
    common = set.intersection(*(set(m) for m in made)) if len(made) == len(ranks) > 1 else set()
    if not common or all(set(m) == common for m in made):
        return []
    told: Apart = []
    for recording, sites in zip(ranks, made, strict=True):
        assert recording is not None
        kept = {opt for site, opts in sites.items() if site in common for opt in opts}
        if not kept & set(recording.column("opt")):
            return []
        told.append((recording, {opt for opts in sites.values() for opt in opts} - kept, None))
    return told


def _by_sharing(recording: Recording) -> tuple[set[int], bool]:
    """The optimizers at whose steps, but the first, neither DDP nor a collective had a part; whether all others share most of theirs."""
    shared: dict[int, list[bool]] = {}
    columns = (recording.column(name) for name in ("opt", "flags", "num_reduce", "num_coll"))
    for opt, flags, reduced, called in zip(*columns, strict=True):
        shared.setdefault(opt, []).append(bool(flags & protocol.FLAG_DDP or reduced or called))
    alone = {opt for opt, each in shared.items() if len(each) > 1 and not any(each[1:])}
    return alone, protocol.OPT_BY_HAND not in alone and all(2 * sum(each) > len(each) for opt, each in shared.items() if opt not in alone)


def _split(recording: Recording, wrapped: int) -> tuple[set[int], set[int]]:
    """The optimizers that step before a step, and those that do from it on."""
    before: set[int] = set()
    after: set[int] = set()
    for step, opt in zip(recording.column("step"), recording.column("opt"), strict=True):
        (before if step < wrapped else after).add(opt)
    return before, after


def _made(recording: Recording) -> dict[tuple[str, int], set[int]]:
    """Statement that made an optimizer -> the numbers of those it made."""
    found: dict[tuple[str, int], set[int]] = {}
    for event in recording.of(protocol.PARAMS):
        if (where := event.where) is not None and isinstance(event["opt"], int) and event["opt"] != protocol.OPT_BY_HAND:
            found.setdefault((where.file, where.line), set()).add(event["opt"])
    return found


def _trimmed(recording: Recording, solo: set[int], wrapped: Event | None) -> Recording:
    """A new recording; rows are dense up to step 1,024, so what stands before a step is counted exactly up to there, or up to DDP's first wrap."""
    numbers = list(zip(recording.column("step"), recording.column("opt"), strict=True))
    dropped = range(wrapped.step) if wrapped is not None else sorted(step for step, opt in numbers if opt in solo)
    opts = {old: new for new, old in enumerate(sorted({o for _, o in numbers} - solo - {protocol.OPT_BY_HAND}))}
    shift = _Shift(dropped)
    rows = b"".join(_renumbered(recording.raw(i), shift(step), opts.get(opt, opt)) for i, (step, opt) in enumerate(numbers) if opt not in solo)
    gone = set(dropped)
    loops = _loops(recording, gone, wrapped)
    events = [
        _moved(e, shift, opts)
        for e in recording.events
        if e["opt"] not in solo and not (e.kind in TOLD_A_STEP and e.step in gone) and not (e.kind in PASSES and e["loop"] in loops)
        and not (e.kind == "evaluated" and wrapped is not None and e.t_ns < wrapped.t_ns)
    ]  # fmt: skip
    new = replace(recording, events=events, rows=rows)
    new.__dict__["details"] = {(shift(s), opts.get(o, o)): kept for (s, o), kept in recording.details.items() if o not in solo}
    return new


def _loops(recording: Recording, gone: set[int], wrapped: Event | None) -> set[int]:
    """Passes over loaders that belong to dropped steps: all steps of theirs are, or they come, measurements too, before the wrap."""
    opened = {e["loop"]: e.step for e in recording.of("loader")}
    taken = {e["loop"]: range(opened.get(e["loop"], e.step), e.step) for e in recording.of("pass")}
    own = {loop for loop, steps in taken.items() if steps and gone.issuperset(steps)}
    return own | {e["loop"] for e in recording.of("pass") if wrapped is not None and e.t_ns < wrapped.t_ns}


class _Shift:
    """Step number -> the number that it has without the dropped ones."""

    def __init__(self, dropped: Sequence[int]) -> None:
        self._dropped = dropped

    def __call__(self, step: int) -> int:
        return step - bisect_left(self._dropped, step)


def _renumbered(raw: bytes, step: int, opt: int) -> bytes:
    row = bytearray(raw)
    for name, value in (("step", step), ("opt", opt)):
        offset, fmt = protocol.NUMBER_OFFSET[name]
        fmt.pack_into(row, offset, value)
    return bytes(row)


def _comparable(ranks: list[Recording]) -> list[Recording]:
    """Steps of one number had others before: a digest that only some ranks took at it is taken by none."""
    tables = [r.step_index for r in ranks]
    rows = [bytearray(r.rows) for r in ranks]
    for step in set(tables[0]).intersection(*tables[1:]):
        blank = _blank([r.raw(t[step]) for r, t in zip(ranks, tables, strict=True)])
        for own, table in zip(rows, tables, strict=True):
            start = table[step] * protocol.ROW.size
            for part in blank:
                own[start + part.start : start + part.stop] = bytes(part.stop - part.start)
    return [_with_rows(r, bytes(own)) for r, own in zip(ranks, rows, strict=True)]


def _blank(raws: Sequence[bytes]) -> list[slice]:
    names = {*BY_STEP, *(WITNESS if _on_some(raws, "param") else ()), *(("rng",) if _on_some(raws, "rng") else ())}
    return [protocol.DIGEST_SLICE[name] for name in names]


def _on_some(raws: Sequence[bytes], digest: str) -> bool:
    taken = [any(raw[protocol.DIGEST_SLICE[digest]]) for raw in raws]
    return any(taken) and not all(taken)


def _with_rows(recording: Recording, rows: bytes) -> Recording:
    new = replace(recording, rows=rows)
    new.__dict__["details"] = recording.details
    return new


def _moved(event: Event, shift: _Shift, opts: Mapping[int, int]) -> Event:
    counted = (*STEP_FIELDS, "steps") if event.kind == protocol.END else STEP_FIELDS  # elsewhere they are those of one pass, of one file
    data: dict[str, Any] = {k: shift(v) if k in counted and isinstance(v, int) and not isinstance(v, bool) else v for k, v in event.data.items()}
    if isinstance(data.get("opt"), int):
        data["opt"] = opts.get(data["opt"], data["opt"])
    return replace(event, step=shift(event.step), data=data)
