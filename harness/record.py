"""A recorded run as the checks see it: recordings by rank, aligned step rows, events. Reads files; judges nothing.

Rows stay raw bytes until somebody opens one: 1,024 ranks x 1,000 steps are 250 MB of bytes, but would be gigabytes of objects.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import msgspec

from harness import collector, columns
from harness.model import Ending, Plan, Where
from harness.probe import protocol
from harness.probe.protocol import Row
from harness.steps import AlignedStep, Step

MAX_EVENT_BYTES = 8_000_000  # of one line; a longer one is not ours


@dataclass(frozen=True, slots=True)
class Event:
    """One JSON line of a recording."""

    kind: str
    t_ns: int
    step: int
    data: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.data.get(key)

    @property
    def where(self) -> Where | None:
        return where_of(self.data.get("site"))


def where_of(site: Any) -> Where | None:
    """The `site` of an event as a Where; None for anything else than a well-formed one."""
    if not isinstance(site, Mapping) or not isinstance(site.get("file"), str):
        return None
    line = site.get("line")
    return Where(site["file"], line if isinstance(line, int) else 0, str(site.get("func") or ""), str(site.get("text") or ""))


def parse_events(blob: bytes, sites: dict[object, Any] | None = None) -> Iterator[Event]:
    """Events of a .jsonl blob; a torn or malformed line is skipped (a killed rank leaves one, a forged recording many). Equal sites become one
    object, kept in `sites`: the ranks of a run stand on the same few lines."""
    known = {} if sites is None else sites
    for line in blob.split(b"\n"):
        if not line or len(line) > MAX_EVENT_BYTES:
            continue
        data = _decoded(line)
        if not isinstance(data, dict):
            continue
        kind, t_ns, step = data.get("k"), data.get("t"), data.get("s", 0)
        if isinstance(kind, str) and isinstance(t_ns, int) and isinstance(step, int):
            if isinstance(data.get("site"), dict):
                data["site"] = _shared(known, data["site"])
            yield Event(sys.intern(kind), t_ns, step, data)


def _shared(known: dict[object, Any], site: dict[str, Any]) -> Any:
    try:
        return known.setdefault(tuple(site.items()), site)
    except TypeError:  # forged: a list or a table inside
        return site


def _decoded(line: bytes) -> Any:
    """msgspec takes a third of json's time and keeps one copy of a key; it knows no NaN, which json writes and reads."""
    try:
        return msgspec.json.decode(line)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@dataclass
class Recording:
    """What one process wrote. `rank` is its rank in the training world; -1 where it has none."""

    stem: str
    events: list[Event] = field(default_factory=list)
    rows: bytes = b""  # without the magic
    params: bytes = b""  # without the magic
    rank: int = -1
    damage: str = ""  # what of the files was not readable; a torn last line is legal
    status: protocol.Status | None = None  # its page as it was read last: what a rank that was killed was in; None where there is none

    def of(self, kind: str) -> list[Event]:
        return self._by_kind.get(kind, [])

    @cached_property
    def _by_kind(self) -> dict[str, list[Event]]:
        table: dict[str, list[Event]] = {}
        for event in self.events:
            table.setdefault(event.kind, []).append(event)
        return table

    @property
    def start(self) -> Mapping[str, Any]:
        first = self.of(protocol.START)
        return first[0].data if first else {}

    @property
    def pid(self) -> int:
        return number(self.start.get("pid"), -1)

    @property
    def ppid(self) -> int:
        return number(self.start.get("ppid"), -1)

    @property
    def env_rank(self) -> int:
        """RANK as the process found it in its environment; -1: unset."""
        return number(self.start.get("rank"), -1)

    @property
    def role(self) -> str:
        """ "main": started by the launcher; "child": made by the script (mp.spawn, fork)."""
        return str(self.start.get("role") or "main")

    @property
    def num_rows(self) -> int:
        return len(self.rows) // protocol.ROW.size

    def raw(self, index: int) -> bytes:
        size = protocol.ROW.size
        return self.rows[index * size : (index + 1) * size]

    def row(self, index: int) -> Row:
        return Row._make(protocol.ROW.unpack(self.raw(index)))

    def all_rows(self) -> list[Row]:
        whole = self.num_rows * protocol.ROW.size
        return [Row._make(fields) for fields in protocol.ROW.iter_unpack(self.rows[:whole])]

    def column(self, name: str) -> array[Any]:
        """One number of every row; kept, 8 bytes a row."""
        found = self._columns.get(name)
        if found is None:
            found = self._columns[name] = columns.numbers(self.rows, name)
        return found

    @cached_property
    def _columns(self) -> dict[str, array[Any]]:
        return {}

    @cached_property
    def step_index(self) -> dict[int, int]:
        """Step number -> row index. Steps are written in order; a repeated number keeps the first."""
        table: dict[int, int] = {}
        for index, step in enumerate(self.column("step")):
            table.setdefault(step, index)
        return table

    @cached_property
    def num_steps(self) -> int:
        """Steps taken so far, thinned ones included."""
        last = max(self.column("step"), default=-1) + 1
        ends = [number(e["steps"], -1) for e in self.of(protocol.END)]
        return max([last, *ends])

    @property
    def lost_steps(self) -> int:
        """Steps that are in no row, and not in `num_steps`, because the probe failed at them."""
        return max((number(e["lost_steps"]) for e in self.of(protocol.END)), default=0)

    @cached_property
    def details(self) -> dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]]:
        """(step, opt) -> (gradient digests, parameter digests), in the order of `param_names(opt)`."""
        table: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        at, blob, head = 0, self.params, protocol.DETAIL
        while at + head.size <= len(blob):
            step, opt, num = head.unpack_from(blob, at)
            body = at + head.size
            end = body + 8 * num
            if end > len(blob):
                break
            values = memoryview(blob)[body:end].cast("I").tolist()
            table.setdefault((step, opt), (tuple(values[:num]), tuple(values[num:])))
            at = end
        return table

    def params_at(self, opt: int, step: int | None = None) -> Event | None:
        """The "params" event of optimizer `opt` that holds at a step (its parameters may change); the last one without a step."""
        events = [e for e in self.of(protocol.PARAMS) if e["opt"] == opt]
        held = events if step is None else [e for e in events if e.step <= step]
        return held[-1] if held else events[0] if events else None

    def param_names(self, opt: int, step: int | None = None) -> list[str]:
        """Names in the order of the detail digests of optimizer `opt` at a step."""
        event = self.params_at(opt, step)
        names = event["names"] if event is not None else None
        return [str(n) for n in names] if isinstance(names, list) else []


def number(value: Any, default: int = 0) -> int:
    """A whole number of a recording, or the default for anything else: recordings may be forged."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    return value if isinstance(value, int) else int(value) if math.isfinite(value) else default


def texts(value: Any) -> list[str]:
    """The entries of a list of a recording; none for anything else."""
    return [str(one) for one in value] if isinstance(value, list) else []


@dataclass
class Run:
    """All recordings of a run, put in order. `ranks[r]` is rank r's recording, or None where it never reported."""

    plan: Plan
    ranks: list[Recording | None]
    processes: list[Recording]  # every process that reported, the ranks among them
    ending: Ending = field(default_factory=Ending)
    logs: Mapping[int, str] = field(default_factory=dict)  # launched rank -> its captured output
    reference: Run | None = None
    num_cores: int = 1
    expect: Mapping[str, Any] = field(default_factory=dict)
    nodes: Sequence[Mapping[str, Any]] = ()  # of a Slurm job: what each supervisor found on its node
    live: bool = False  # the run goes on; the last rows may be missing on some ranks
    others: list[Run] = field(default_factory=list)  # worlds that the script made before or after this one (see worlds.py)
    num_unjudged: int = 0  # worlds beyond those
    aside: frozenset[str] = frozenset()  # stems of processes whose failures are those of another world
    over: bool = False  # the script went on behind it: how the run ended is told of another world
    unreadable: list[str] = field(default_factory=list)  # what checks stumbled over while they judged: forged values, or another version's

    @property
    def present(self) -> list[Recording]:
        return [r for r in self.ranks if r is not None]

    @property
    def world_size(self) -> int:
        return len(self.ranks)

    @property
    def rank_ids(self) -> tuple[int, ...]:
        return tuple(range(len(self.ranks)))

    @cached_property
    def step_numbers(self) -> list[int]:
        columns_of = {bytes(r.column("step")): r.column("step") for r in self.present}  # most ranks took the same steps
        return sorted({step for column in columns_of.values() for step in column})

    def steps(self) -> Iterator[Step]:
        """Aligned steps in order. A rank that has fewer steps is None in the later ones."""
        aligned = self._aligned
        for at in range(aligned.num):
            yield AlignedStep(self.step_numbers[at], at, self.ranks, aligned)
        if aligned.num == len(self.step_numbers):
            return
        tables = [(r, r.step_index) if r is not None else None for r in self.ranks]
        for number in self.step_numbers[aligned.num :]:
            raw: list[bytes | None] = []
            for entry in tables:
                if entry is None:
                    raw.append(None)
                    continue
                recording, table = entry
                index = table.get(number)
                raw.append(None if index is None else recording.raw(index))
            yield Step(number, raw)

    @cached_property
    def _aligned(self) -> columns.Table:
        """The steps from the first on that every reporting rank has at the same place."""
        steps = [r.column("step") for r in self.present]
        num = min(map(len, steps), default=0)
        first = steps[0][:num] if steps else []
        rises = all(a < b for a, b in itertools.pairwise(first))
        if not rises or any(column[:num] != first for column in steps) or any(c[i] < first[-1] for c in steps if num for i in range(num, len(c))):
            num = 0
        present = self.present
        return columns.Table([r.rows for r in present], num, lambda name: [r.column(name) for r in present])

    def events(self, kind: str) -> Iterator[tuple[int, Event]]:
        """(rank, event) over all ranks, rank by rank."""
        for rank, recording in enumerate(self.ranks):
            if recording is not None:
                for event in recording.of(kind):
                    yield rank, event

    @property
    def num_steps(self) -> int:
        return max((r.num_steps for r in self.present), default=0)

    @property
    def mostly_lost(self) -> tuple[int, int] | None:
        """(steps at which the probe failed, all steps) of a rank on which these are most; None where there is no such rank. Such a step may still be
        seen as one made by hand."""
        lost = [(r.lost_steps, r) for r in self.present if r.lost_steps]
        told = [(num, max(r.num_steps, num + sum(opt != protocol.OPT_BY_HAND for opt in r.column("opt")))) for num, r in lost]
        return next(((num, total) for num, total in told if 2 * num > total), None)

    @cached_property
    def finished(self) -> bool:
        """Every rank ended by itself with exit code 0."""
        return bool(self.ending.exits) and all(e.code == 0 for e in self.ending.exits) and self.ending.reason == "exited"


def load_recordings(rec_dir: Path) -> list[Recording]:
    """All recordings of a run folder, finished or not; follows no link, opens nothing else."""
    with collector.paused():
        return _load(rec_dir)


def _load(rec_dir: Path) -> list[Recording]:
    """The rows of all first, then what else they wrote: ranks write on while they are read, and nobody may lack what came before a row that is there."""
    if not rec_dir.is_dir() or rec_dir.is_symlink():
        return []
    paths = [path for path in sorted(rec_dir.glob("*.jsonl")) if not path.is_symlink() and path.is_file()]
    rows = [_rows(path) for path in paths]
    sites: dict[object, Any] = {}
    return [_read(path, before, sites) for path, before in zip(paths, rows, strict=True)]


def _read(path: Path, rows: bytes, sites: dict[object, Any]) -> Recording:
    blob = path.read_bytes()
    recording = Recording(stem=path.stem, events=list(parse_events(blob, sites)))
    whole = blob.count(b"\n")
    if len(recording.events) < whole or not recording.of(protocol.START):
        recording.damage = f"{whole - len(recording.events)} of {whole} events are unreadable"
    recording.rows = rows if not recording.of(protocol.END) else _rows(path)  # it ended meanwhile, and tells how many there are
    recording.params = _tail(path.with_suffix(".params"), protocol.PARAMS_MAGIC)
    recording.status = protocol.parse_status(_tail(path.with_suffix(".status"), b""))
    lost = _lost_rows(recording)
    recording.damage = recording.damage or (f"{lost} step rows are missing" if lost > 0 else "")
    return recording


def _rows(path: Path) -> bytes:
    return _tail(path.with_suffix(".rows"), protocol.ROWS_MAGIC)


def _lost_rows(recording: Recording) -> int:
    """Rows of steps that the process says it took and that are not there: by its last event, or by its status page, whose space was taken at its
    start, where a full disk left no room for that."""
    ends = recording.of(protocol.END)
    told = recording.status if not ends and recording.role == "main" else None  # a fork's page may count its parent's steps
    steps = number(ends[-1]["steps"], 0) if ends else told.step if told is not None else 0
    return _num_kept(min(steps, 1_000_000)) - recording.num_rows if steps else 0


@cache
def _num_kept(steps: int) -> int:
    return sum(map(protocol.kept, range(steps)))


def _tail(path: Path, magic: bytes) -> bytes:
    if path.is_symlink() or not path.is_file():
        return b""
    blob = path.read_bytes()
    return blob[len(magic) :] if blob.startswith(magic) else b""


def finite(values: Sequence[float]) -> list[float]:
    """The finite ones of a series."""
    return [v for v in values if math.isfinite(v)]
