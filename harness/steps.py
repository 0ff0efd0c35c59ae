"""Optimizer steps aligned over the ranks, opened only where a check asks: rows stay raw bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness import columns
from harness.probe import protocol
from harness.probe.protocol import Row

if TYPE_CHECKING:
    from harness.record import Recording


class Step:
    """One optimizer step, aligned over the ranks that have it: `raw[rank]` is None where a rank has no such row."""

    __slots__ = ("_raw", "_rows", "index")

    def __init__(self, index: int, raw: Sequence[bytes | None]) -> None:
        self.index = index
        self._raw: Sequence[bytes | None] | None = raw
        self._rows: list[Row | None] | None = None

    @property
    def raw(self) -> Sequence[bytes | None]:
        assert self._raw is not None
        return self._raw

    def same(self, digest: str) -> bool:
        """Whether all ranks that have this step agree on a digest, compared on raw bytes."""
        part = protocol.DIGEST_SLICE[digest]
        first: bytes | None = None
        for raw in self.raw:
            if raw is None:
                continue
            if first is None:
                first = raw[part]
            elif raw[part] != first:
                return False
        return True

    def taken(self, digest: str) -> bool:
        """Whether a digest was taken at this step: those of parameters are at the first steps and now and then after them."""
        part = protocol.DIGEST_SLICE[digest]
        return any(next((raw[part] for raw in self.raw if raw is not None), b""))

    @property
    def complete(self) -> bool:
        return all(raw is not None for raw in self.raw)

    def number(self, name: str) -> list[Any]:
        """One number of every present rank without decoding whole rows."""
        offset, fmt = protocol.NUMBER_OFFSET[name]
        return [fmt.unpack_from(raw, offset)[0] for raw in self.raw if raw is not None]

    @property
    def rows(self) -> list[Row | None]:
        if self._rows is None:
            self._rows = [None if raw is None else Row._make(protocol.ROW.unpack(raw)) for raw in self.raw]
        return self._rows


class AlignedStep(Step):
    """A step that all reporting ranks have, at the same place of their recordings: nothing is cut out before somebody asks for it."""

    __slots__ = ("_at", "_ranks", "_table")

    def __init__(self, index: int, at: int, ranks: Sequence[Recording | None], table: columns.Table) -> None:
        self.index, self._at, self._ranks, self._table = index, at, ranks, table
        self._raw = self._rows = None

    @property
    def raw(self) -> Sequence[bytes | None]:
        if self._raw is None:
            self._raw = [None if r is None else r.raw(self._at) for r in self._ranks]
        return self._raw

    @property
    def complete(self) -> bool:
        return len(self._table.blobs) == len(self._ranks)

    def same(self, digest: str) -> bool:
        return self._table.same(digest, self._at)

    def taken(self, digest: str) -> bool:
        return self._table.taken(digest, self._at)

    def number(self, name: str) -> list[Any]:
        return self._table.number(name, self._at)
