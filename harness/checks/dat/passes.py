"""Passes over data loaders as the checks see them: the "pass" event joined with the "loader" event that opened it."""

from __future__ import annotations

import base64
import binascii
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from harness.model import Where
from harness.record import Event, Run

MAX_UNPACKED_BYTES = 4 * 65_536 + 1024


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


@dataclass(frozen=True)
class Pass:
    """One pass of one rank over one loader."""

    rank: int
    opened: Event
    closed: Event

    @property
    def loader(self) -> int:
        return int(self.closed["loader"] or 0)

    @property
    def where(self) -> Where | None:
        return self.closed.where

    @property
    def order(self) -> int:
        return int(self.closed["order"] or 0)

    @property
    def num_samples(self) -> int:
        return int(self.closed["num_samples"] or 0)

    @property
    def num_batches(self) -> int:
        return int(self.closed["num_batches"] or 0)

    @property
    def complete(self) -> bool:
        return bool(self.closed["complete"])

    @property
    def trains(self) -> bool:
        """A backward ran while it was open."""
        return bool(self.closed["backwards"])

    @cached_property
    def indices(self) -> tuple[int, ...]:
        return unpack(self.closed["indices"])

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return unpack(self.closed["rows"])

    @property
    def distributed(self) -> Mapping[str, Any] | None:
        found = self.opened["distributed"]
        return found if isinstance(found, Mapping) else None

    @property
    def shuffles(self) -> bool:
        """Whether the sampler draws a random order: DistributedSampler(shuffle=True) or RandomSampler and the like."""
        if self.distributed is not None:
            return bool(self.distributed.get("shuffle"))
        return self.opened["sampler"] in ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")


def all_passes(run: Run) -> list[Pass]:
    """Every pass that ended or was cut off, in order, rank by rank."""
    found: list[Pass] = []
    for rank, recording in enumerate(run.ranks):
        if recording is None:
            continue
        opened = {e["loop"]: e for e in recording.of("loader")}
        found.extend(Pass(rank, opened[e["loop"]], e) for e in recording.of("pass") if e["loop"] in opened)
    return found


def training(run: Run) -> list[Pass]:
    return [p for p in all_passes(run) if p.trains]


def by_loader(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Passes of one rank over one loader, in order."""
    groups: dict[tuple[int, int], list[Pass]] = {}
    for one in passes:
        groups.setdefault((one.rank, one.loader), []).append(one)
    return list(groups.values())
