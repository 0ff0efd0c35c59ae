"""Passes over data loaders as the checks see them: the "pass" event joined with the "loader" event that opened it, aligned over the
ranks."""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.checks.base import NotApplicable
from harness.model import Where
from harness.probe import protocol
from harness.record import Event, Recording, Run, number, where_of

MAX_UNPACKED_BYTES = 4 * 65_536 + 1024
MAX_COMPARED = 64  # ranks whose samples are compared with each other, which costs their square
RANDOM_SAMPLERS = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")


def unpack(text: Any) -> tuple[int, ...]:
    """Integers packed by the probe's loader sensor; empty for anything else."""
    if not isinstance(text, str) or not text:
        return ()
    try:
        blob = zlib.decompressobj().decompress(base64.b64decode(text), MAX_UNPACKED_BYTES)
    except (zlib.error, binascii.Error, ValueError):
        return ()
    num = len(blob) // 4
    return struct.unpack(f"<{num}I", blob[: 4 * num])


def attributes(recording: Recording, kind: str) -> Mapping[str, Any]:
    """What the first data set of this class keeps in sequences: name -> [ordered digest, sorted digest, length, site]."""
    told = [e["attributes"] for e in recording.of("dataset") if e["kind"] == kind and isinstance(e["attributes"], Mapping)]
    return told[0] if told else {}


@dataclass(frozen=True)
class Pass:
    """One pass of one rank over one loader. `closed` is None where the process ended inside it without a word."""

    rank: int
    opened: Event
    closed: Event | None
    drawn_at_least: int = 0  # batches of the steps taken while it was open; for a pass that was never closed

    def _field(self, key: str) -> Any:
        return None if self.closed is None else self.closed[key]

    @property
    def loader(self) -> int:
        return number(self.opened["loader"])

    @property
    def where(self) -> Where | None:
        """The statement that iterates."""
        return self.opened.where

    def result_line(self, run: Run) -> Where | None:
        """The statement behind the loop that makes numbers of what it summed; else the loop."""
        for _, event in run.events("loop"):
            if event.where == self.where and event["of"] == "loader":
                return where_of(event["result"]) or self.where
        return self.where

    @property
    def made(self) -> Where | None:
        """The statement that made the loader."""
        return where_of(self.opened["made"]) or self.where

    @property
    def made_sampler(self) -> Where | None:
        return where_of(self.opened["made_sampler"]) or self.made

    @property
    def made_dataset(self) -> Where | None:
        return next(iter(self.dataset_lines), self.made)

    @property
    def dataset_lines(self) -> tuple[Where, ...]:
        """The statements that made the data set, and what went into it, nearest first."""
        listed = self.opened["made_dataset"]
        return tuple(w for s in listed if (w := where_of(s)) is not None) if isinstance(listed, list) else ()

    def dataset_line(self, pattern: str) -> Where | None:
        """The nearest of these that looks like it; else the nearest of all."""
        return next((w for w in self.dataset_lines if re.search(pattern, w.text)), self.made_dataset)

    @property
    def order(self) -> int:
        return number(self._field("order"))

    @property
    def content(self) -> int:
        return number(self._field("content"))

    @property
    def num_samples(self) -> int:
        return number(self._field("num_samples"))

    @property
    def num_batches(self) -> int:
        return self.drawn_at_least if self.closed is None else number(self.closed["num_batches"])

    @property
    def planned(self) -> int:
        """len(loader), as it was opened; 0 where it has none."""
        return number(self.opened["planned"])

    @property
    def steps(self) -> int:
        return number(self._field("steps"))

    @property
    def backwards(self) -> int:
        return number(self._field("backwards"))

    @property
    def first_trained(self) -> int:
        """Which of its batches the first backward followed, counted from 1; 0: none."""
        return number(self._field("first_trained"))

    @property
    def complete(self) -> bool:
        return bool(self._field("complete"))

    @property
    def exhausted(self) -> bool:
        """It ran to the end of its loader, or (islice, zip) took all batches of it."""
        return self.complete or (self.closed is not None and 0 < self.planned <= self.num_batches)

    @property
    def trains(self) -> bool:
        """A backward ran while it was open."""
        return not self.let_go and bool(self._field("backwards")) if self.closed is not None else self.drawn_at_least > 0

    @property
    def let_go(self) -> bool:
        """The iterator was gone before a backward came: `next(iter(loader))`, for a step, or for a picture of the samples."""
        return bool(self._field("let_go"))

    @property
    def evaluates(self) -> bool:
        """No backward, and either no gradients or a model in eval mode: a measurement, not a look at the data."""
        return (
            self.closed is not None
            and not self.trains
            and not self.let_go
            and self.num_batches > 0
            and (not self.closed["grad"] or not self.closed["training"])
        )

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Sample indices of the batches that were handed out (workers fetch ahead)."""
        found = unpack(self._field("indices"))
        return found if self.complete or not self.num_samples else found[: self.num_samples]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Digests of the samples; nothing where they do not stand beside the indices one by one (batches of another layout)."""
        found = unpack(self._field("rows"))
        return found if self.iterable or len(found) >= min(self.num_samples, len(self.indices)) else ()

    @cached_property
    def distinct(self) -> bool:
        """Whether digests tell samples apart: most of them are different."""
        return len(self.rows) > 3 and len(set(self.rows)) >= 0.5 * len(self.rows)

    @cached_property
    def labels(self) -> tuple[int, ...]:
        return unpack(self._field("labels"))

    def by_shape(self, values: Sequence[int]) -> tuple[int, ...]:
        """These of the samples, one each, such that those are alike whose samples have one shape: padded to the longest of its batch, a sample
        looks different in another."""
        told = self._field("shapes")
        shapes: Iterable[int] = itertools.repeat(told) if isinstance(told, int) else unpack(told)
        return tuple(hash(pair) for pair in zip(shapes, values, strict=False)) if told else tuple(values)

    @property
    def distributed(self) -> Mapping[str, Any] | None:
        found = self.opened["distributed"]
        return found if isinstance(found, Mapping) else None

    @property
    def subset(self) -> Mapping[str, Any] | None:
        found = self.opened["subset"]
        return found if isinstance(found, Mapping) else None

    @property
    def dataset_len(self) -> int:
        return number(self.opened["dataset_len"], -1)

    @property
    def iterable(self) -> bool:
        return bool(self.opened["iterable"])

    @property
    def custom(self) -> bool:
        """The sampler or batch sampler is the script's own."""
        return bool(self.opened["custom_batch_sampler"]) or bool(self.opened["custom_sampler"])

    @property
    def shuffles(self) -> bool:
        """Whether the sampler draws a random order: DistributedSampler(shuffle=True) or RandomSampler and the like."""
        if self.distributed is not None:
            return bool(self.distributed.get("shuffle"))
        return self.opened["sampler"] in RANDOM_SAMPLERS

    @cached_property
    def key(self) -> tuple[str, int, int]:
        """Which statement iterates which loader: the same on all ranks, however often loaders are made anew."""
        at, made = self.where, where_of(self.opened["made"])
        return (at.file.rpartition("/")[-1] if at else "", at.line if at else 0, made.line if made else 0)


def of_recording(rank: int, recording: Recording) -> list[Pass]:
    """Passes of one process, in order."""
    closed = {e["loop"]: e for e in recording.of("pass")}
    found = []
    for opened in recording.of("loader"):
        end = closed.get(opened["loop"])
        found.append(Pass(rank, opened, end, 0 if end is not None else _drawn_since(recording, opened.t_ns)))
    return found


def _drawn_since(recording: Recording, t_ns: int) -> int:
    (at, stamp), (also_at, count), size = protocol.NUMBER_OFFSET["t_ns"], protocol.NUMBER_OFFSET["num_batches"], protocol.ROW.size
    starts = range(0, recording.num_rows * size, size)
    return sum(count.unpack_from(recording.rows, s + also_at)[0] for s in starts if stamp.unpack_from(recording.rows, s + at)[0] > t_ns)


def all_passes(run: Run) -> list[Pass]:
    """Every pass, closed or not, in order, rank by rank. Read once a judgement."""
    found = run.__dict__.get("_passes")
    if not isinstance(found, list):
        found = [p for rank, recording in enumerate(run.ranks) if recording is not None for p in of_recording(rank, recording)]
        run.__dict__["_passes"] = found
    return found


def training(run: Run) -> list[Pass]:
    """Closed passes in which a backward ran, or whose one batch was drawn for a step. Read once a judgement."""
    found = run.__dict__.get("_training_passes")
    if not isinstance(found, list):
        every = [p for p in all_passes(run) if p.closed is not None]
        drawn = {id(p) for group in by_key([p for p in every if p.let_go]) if _at_every_step(group) for p in group}
        found = run.__dict__["_training_passes"] = [p for p in every if p.trains or id(p) in drawn]
    return found


def _at_every_step(group: Sequence[Pass]) -> bool:
    """Batches drawn one by one, nearly as many as there were steps meanwhile: they are what the steps are taken with."""
    return len(group) >= 4 and 2 * len(group) > group[-1].opened.step - group[0].opened.step


def few(passes: Sequence[Pass]) -> list[Pass]:
    """Those of the first ranks: enough to name a cause that all ranks share."""
    return [p for p in passes if p.rank < MAX_COMPARED]


def same_order(group: Sequence[Pass]) -> bool:
    """All ranks drew the same indices in the same order, as far as the shorter one of each two goes; ends at the first difference."""
    first = group[0]
    for other in group[1:]:
        if first.order != other.order or not first.order:
            num = min(len(first.indices), len(other.indices))
            if first.indices[:num] != other.indices[:num]:
                return False
    return True


def evaluating(run: Run) -> list[Pass]:
    return [p for p in all_passes(run) if p.evaluates]


def by_key(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Passes of one rank by one statement over loaders made by one statement, in order."""
    groups: dict[tuple[Any, ...], list[Pass]] = {}
    for one in passes:
        groups.setdefault((one.rank, *one.key), []).append(one)
    return list(groups.values())


def aligned(run: Run, passes: Sequence[Pass]) -> list[list[Pass]]:
    """The n-th pass of one statement on every rank, one list each, ordered by rank; only those that all ranks have."""
    tables: dict[tuple[Any, ...], dict[int, Pass]] = {}
    for group in by_key(passes):
        for nth, one in enumerate(group):
            tables.setdefault((*one.key, nth), {})[one.rank] = one
    wanted = [rank for rank, recording in enumerate(run.ranks) if recording is not None]
    return [[table[rank] for rank in wanted] for table in tables.values() if len(table) == len(wanted) > 1]


def resampled(run: Run, one: Pass) -> bool:
    """Whether the stream's code draws with replacement: what two ranks have in common is chance."""
    recording = run.ranks[one.rank]
    return recording is not None and any(e["kind"] == one.opened["dataset"] and e["resampled"] is True for e in recording.of("dataset"))


def several_ranks(run: Run) -> None:
    """NotApplicable unless at least two ranks reported."""
    if run.world_size < 2:
        raise NotApplicable("one process: nothing to compare with")
    if len(run.present) < 2:
        raise NotApplicable("fewer than two ranks reported")
