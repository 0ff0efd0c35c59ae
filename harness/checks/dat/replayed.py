"""Batches of one pass that are trained on again and again: `itertools.cycle(loader)`, or a list that was made of the loader once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.probe import protocol
from harness.record import Event, Recording, Run, number

MIN_AGAIN = 8  # steps on batches that were trained on before, bit for bit and in the same order
NUM_WITNESSED = 256  # the first rows all carry digests, see protocol.witnessed
MIN_BATCHES = 3  # one or two batches that are used again are a test, or full-batch training


@dataclass(frozen=True)
class Replay:
    """One complete pass of one rank, and what became of its batches."""

    one: Pass
    period: int  # optimizer steps from a batch to its return
    again: int  # steps on batches that had been trained on before
    drawn_in_training: bool  # steps were taken while the pass went on: its first round was training
    epoch_set: Event | None  # a set_epoch of its sampler after the pass, which came too late for all of it


def found(run: Run) -> list[Replay]:
    """Of the first ranks, at most one each."""
    replays = []
    for rank, recording in enumerate(run.ranks[: passes.MAX_COMPARED]):
        if recording is not None:
            own = passes.of_recording(rank, recording)
            replays += [r for p in own if (r := _of_pass(recording, p, own)) is not None][:1]
    return replays


def _of_pass(recording: Recording, one: Pass, own: Sequence[Pass]) -> Replay | None:
    if one.closed is None or not one.complete or one.num_batches < MIN_BATCHES:
        return None
    if any(p.opened.t_ns > one.opened.t_ns and (p.key == one.key or p.trains) for p in own):
        return None  # the loader is asked again, or another one feeds the training
    if not one.trains and not _held(recording, one):
        return None
    repeated = _repeated(_batches(recording, one.opened.t_ns))
    if repeated is None:
        return None
    sampler = (one.distributed or {}).get("id")
    late = [e for e in recording.of("set_epoch") if sampler and e["sampler"] == sampler and e.t_ns > one.closed.t_ns]
    return Replay(one, *repeated, one.trains, late[0] if late else None)


def _held(recording: Recording, one: Pass) -> bool:
    """The first batches of a pass without training were still alive some steps after it."""
    return any(e["loop"] == one.opened["loop"] and number(e["alive"]) >= MIN_BATCHES for e in recording.of("batches_held"))


def _batches(recording: Recording, since_ns: int) -> list[int]:
    """What went into the model at each step from a time on, as far as it was looked at."""
    at = protocol.DIGEST_SLICE["batch"]
    drawn = [int.from_bytes(recording.raw(i)[at], "little") for i, t in enumerate(recording.column("t_ns")[:NUM_WITNESSED]) if t > since_ns]
    return drawn[: drawn.index(0)] if 0 in drawn else drawn


def _repeated(batches: Sequence[int]) -> tuple[int, int] | None:
    """(period, steps on batches of an earlier round), if from some step on every batch is the one that came a period before."""
    last = batches[-1:]
    for period in range(MIN_BATCHES, len(batches) - MIN_AGAIN + 1):
        if batches[-1 - period : -period] != last:
            continue
        again = 0
        while again + period < len(batches) and batches[-1 - again] == batches[-1 - again - period]:
            again += 1
        if again >= MIN_AGAIN and len(set(batches[-period:])) >= MIN_BATCHES:
            return period, again
    return None
