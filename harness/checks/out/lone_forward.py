"""A forward of DistributedDataParallel that one rank alone makes, under a condition on the rank. It broadcasts the model's buffers: the wait is as
much one for the other ranks as that in an explicit collective, and where the others wait in one of those, theirs is not the one at fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.checks.hng import waits
from harness.model import Where
from harness.probe import protocol
from harness.record import Event, Recording, Run, where_of

ONE_RANK = re.compile(
    r"rank\w*[\"'()\]]*\s*(==|!=|>)\s*[\"']?\d|\bnot\s+[\w.]*rank|\bif\s+[\w.]*rank\w*(\(\))?\s*:|(is_|\b)(main|master|chief|primary|rank_?(0|zero))"
    r"(_process|_proc|_rank)?\b",
    re.IGNORECASE,
)  # `rank != -1` is asked by scripts that run alone or in a job, and is true on every rank of one


@dataclass(frozen=True)
class LoneForward:
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    inner: Where  # the forward
    where: Where  # what stands under the condition and leads to it
    condition: Where
    buffers: bool


def find(run: Run) -> LoneForward | None:
    """In a run that stands still or broke because collectives do not fit."""
    found = waits.waits(run) if waits.hung(run) else waits.broken(run)
    inside = [w for w in found if w.op == "ddp_forward"]
    rest = [w for w in found if w.op != "ddp_forward"]
    if not inside or not all(w.peers or w.op == "ended" for w in rest) or not any(w.op not in ("ended", "init", "store") for w in rest):
        return None
    told = [_branched(run.ranks[w.rank]) for w in inside]
    if any(t is None for t in told) or len({repr(t) for t in told}) > 1 or told[0] is None:
        return None
    inner, where, condition = told[0]
    if any(_been_at(run.ranks[w.rank], inner) for w in rest):
        return None
    buffers = any(e["broadcast_buffers"] and e["buffers"] for _, e in run.events("wrap"))
    return LoneForward(tuple(w.rank for w in inside), tuple(w.rank for w in rest), inner, where, condition, buffers)


def _branched(recording: Recording | None) -> tuple[Where, Where, Where] | None:
    """(the forward, the statement under the innermost condition on the rank, that condition)."""
    if recording is None:
        return None
    told = [e for e in (*recording.of("stall"), *recording.of(protocol.FAILURE)) if e["op"] == "ddp_forward" and isinstance(e["ways"], list)]
    if not told:
        return None
    frames = _frames(told[-1])
    for way in (w for w in told[-1]["ways"] if isinstance(w, Mapping)):
        condition = where_of(way.get("site"))
        if condition is None or not ONE_RANK.search(condition.text):
            continue
        under = next((f for f in frames if (f.file, f.function) == (condition.file, condition.function) and f.line > condition.line), None)
        if under is not None:
            return frames[0], under, condition
    return None


def _frames(event: Event) -> list[Where]:
    listed = event["stack"] if event.kind == "stall" else event["frames"]
    return [w for f in listed if (w := where_of(f)) is not None] if isinstance(listed, list) else []


def _been_at(recording: Recording | None, inner: Where) -> bool:
    """Whether a rank has told of a forward in that statement: then the condition does not part it from the others."""
    return recording is not None and any(
        e.where is not None and (e.where.file, e.where.line) == (inner.file, inner.line)
        for kind in ("wrap_eval", "measured", "evaluated", "loss")
        for e in recording.of(kind)
    )
