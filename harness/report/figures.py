"""The summary numbers of a run: loss, memory, throughput. Computed from rows; what is missing is None, never 0.

Only the columns needed are unpacked (the rest of a row is padding to the struct), so 1,024 ranks x 1,000 steps take about a second.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.probe import protocol
from harness.record import Recording, Run

MIN_WARM_UP = 3  # steps left out of every time: imports on first use, allocator growth, the first collective
WARM_UP_SHARE = 0.1
MIN_TIMED = 5  # steps behind the warm-up below which a percentile says nothing


class _Picked(NamedTuple):
    step: int
    num_samples: int
    loss: float
    wall_s: float
    data_s: float
    probe_s: float
    rss_bytes: int
    cuda_alloc_bytes: int
    cuda_reserved_bytes: int


def _picker() -> struct.Struct:
    """A struct as long as a row that unpacks the fields of _Picked and skips all others."""
    layout, at = "<", 0
    for name in _Picked._fields:
        offset, fmt = protocol.NUMBER_OFFSET[name]
        layout += f"{offset - at}x{fmt.format[1:]}"
        at = offset + fmt.size
    return struct.Struct(f"{layout}{protocol.ROW.size - at}x")


PICKER = _picker()


@dataclass(frozen=True)
class RankFigures:
    """One line of the per-rank table."""

    rank: int
    reported: bool
    num_steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    peak_rss_bytes: int | None = None
    peak_cuda_bytes: int | None = None
    peak_cuda_reserved_bytes: int | None = None
    step_p50_s: float | None = None
    step_p95_s: float | None = None
    samples_per_s: float | None = None
    data_share: float | None = None
    probe_share: float | None = None
    num_timed: int = 0
    samples_per_step: float | None = None


def rank_figures(rank: int, recording: Recording | None) -> RankFigures:
    if recording is None:
        return RankFigures(rank, reported=False)
    whole = recording.num_rows * protocol.ROW.size
    rows = [_Picked._make(fields) for fields in PICKER.iter_unpack(recording.rows[:whole])]
    losses = [row.loss for row in rows if not math.isnan(row.loss)]
    timed = _after_warm_up(rows)
    walls = sorted(row.wall_s for row in timed)
    total_s = sum(walls)
    enough = len(walls) >= MIN_TIMED and total_s > 0
    num_samples = sum(row.num_samples for row in timed)
    return RankFigures(
        rank=rank,
        reported=True,
        num_steps=recording.num_steps,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        peak_rss_bytes=_peak(row.rss_bytes for row in rows),
        peak_cuda_bytes=_peak(row.cuda_alloc_bytes for row in rows),
        peak_cuda_reserved_bytes=_peak(row.cuda_reserved_bytes for row in rows),
        step_p50_s=percentile(walls, 50) if enough else None,
        step_p95_s=percentile(walls, 95) if enough else None,
        samples_per_s=num_samples / total_s if enough and num_samples else None,
        data_share=sum(row.data_s for row in timed) / total_s if enough else None,
        probe_share=sum(row.probe_s for row in timed) / total_s if enough else None,
        num_timed=len(walls),
        samples_per_step=statistics.median(drawn) if enough and (drawn := [row.num_samples for row in timed if row.num_samples]) else None,
    )


def workers(run: Run) -> list[RankFigures]:
    """One line a process of the script's own that trains beside the ranks (hogwild), numbered as they began."""
    ranks = {id(r) for r in run.present}
    return [rank_figures(n, p) for n, p in enumerate(p for p in run.processes if id(p) not in ranks and p.num_steps)]


def table(run: Run) -> list[RankFigures]:
    """One line a rank; kept with the run, because summary, report and console each ask for it (1.5 s for 1,024 ranks)."""
    kept: list[RankFigures] | None = run.__dict__.get("_rank_figures")
    if kept is None:
        kept = run.__dict__["_rank_figures"] = [rank_figures(rank, recording) for rank, recording in enumerate(run.ranks)]
    return kept


def _after_warm_up(rows: Sequence[_Picked]) -> Sequence[_Picked]:
    skipped = max(MIN_WARM_UP, int(len(rows) * WARM_UP_SHARE))
    return [row for row in rows[skipped:] if row.wall_s >= 0 and math.isfinite(row.wall_s)]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """By linear interpolation, as numpy does it."""
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _peak(values: Any) -> int | None:
    return max(values, default=0) or None  # 0: not measured


def summarise(run: Run) -> dict[str, Any]:
    """What report.json holds under "summary" and "ranks"."""
    ranks = table(run)
    return {
        "num_steps": run.num_steps,
        "num_worlds": 1 + len(run.others) + run.num_unjudged,
        "loss": _loss(ranks, run),
        "memory": _memory(ranks),
        "throughput": _throughput(ranks, run),
        "probe": {"share": max((r.probe_share for r in ranks if r.probe_share is not None), default=None), **_missed(run)},
    }


def _missed(run: Run) -> dict[str, Any]:
    """What the probe could not look at: how often at least (a process tells five), and what came first. Sensors are silent then."""
    told = [event for _, event in run.events(protocol.PROBE_ERROR)]
    return {"num_errors": len(told), "first_error": f"{told[0]['where']}: {told[0]['error']}" if told else None}


def _loss(ranks: Sequence[RankFigures], run: Run) -> dict[str, Any]:
    """Means over the ranks that have one: each rank's loss is that of its own shard."""
    reference = table(run.reference) if run.reference is not None else []
    return {
        "first": _mean([r.first_loss for r in ranks if r.first_loss is not None]),
        "last": _mean([r.last_loss for r in ranks if r.last_loss is not None]),
        "reference_last": _mean([r.last_loss for r in reference if r.last_loss is not None]),
    }


def _mean(values: Sequence[float]) -> float | None:
    mean = sum(values) / len(values) if values else math.nan  # not fsum: it raises on inf - inf, and recordings may hold anything
    return mean if math.isfinite(mean) else None


def _memory(ranks: Sequence[RankFigures]) -> dict[str, Any]:
    by_rank = {r.rank: r.peak_rss_bytes for r in ranks if r.peak_rss_bytes is not None}
    cuda = [r.peak_cuda_bytes for r in ranks if r.peak_cuda_bytes is not None]
    worst = max(by_rank, key=lambda rank: by_rank[rank], default=None)
    return {
        "peak_rss_bytes": by_rank[worst] if worst is not None else None,
        "peak_rss_rank": worst,
        "sum_peak_rss_bytes": sum(by_rank.values()) or None,
        "peak_cuda_bytes": max(cuda, default=None),
    }


def _throughput(ranks: Sequence[RankFigures], run: Run) -> dict[str, Any]:
    rates = [r.samples_per_s for r in ranks if r.samples_per_s is not None]
    p50 = [r.step_p50_s for r in ranks if r.step_p50_s is not None]
    p95 = [r.step_p95_s for r in ranks if r.step_p95_s is not None]
    shares = [r.data_share for r in ranks if r.data_share is not None]
    total = sum(rates) if rates else None
    return {
        "samples_per_s": total,
        "step_p50_s": statistics.median(p50) if p50 else None,
        "step_p95_s": max(p95, default=None),
        "data_share": max(shares, default=None),
        "samples_per_step": _together([r.samples_per_step for r in ranks]),
        "num_timed_steps": min((r.num_timed for r in ranks if r.num_timed), default=0),
        **_scaling(total, run),
    }


def _together(each: Sequence[float | None]) -> float | None:
    """The global batch, which the learning rate has to fit; None where a rank's share is not known."""
    known = [samples for samples in each if samples is not None]
    return sum(known) if known and len(known) == len(each) else None


def _scaling(total: float | None, run: Run) -> dict[str, Any]:
    """Speed against the reference run; the reader must know the cores: N ranks on fewer cores cannot be N times as fast."""
    if run.reference is None or total is None:
        return {"speedup": None, "reference_samples_per_s": None}
    rates = [r.samples_per_s for r in table(run.reference)]
    known = [rate for rate in rates if rate is not None]
    reference = sum(known) if known else None
    return {"speedup": total / reference if reference else None, "reference_samples_per_s": reference}


def versions(run: Run) -> dict[str, Any]:
    """What the ranks said about their torch; the controller never imports it."""
    for recording in (*run.present, *run.processes):  # a child that was forked says nothing of a torch that its parent imported
        for event in recording.of(protocol.TORCH):
            return {k: event[k] for k in ("version", "cuda", "cuda_available", "num_devices", "threads")}
    joined = [e["torch"] for _, e in run.events(protocol.PROCESS_GROUP) if e["torch"]]  # ranks that a launcher of the script's own started
    return {"version": joined[0]} if joined else {}


def devices(run: Run) -> str:
    """Where the parameters lay: "cpu", "cuda", or both; "" where no parameters were seen."""
    kinds: set[str] = set()
    for _, event in run.events(protocol.PARAMS):
        found = event["devices"]
        kinds.update(str(d).split(":")[0] for d in (found if isinstance(found, list) else [found]) if d)
    return "+".join(sorted(kinds))


def backend(run: Run) -> str:
    for _, event in run.events(protocol.PROCESS_GROUP):
        if event["done"] and event["backend"]:
            return str(event["backend"])
    return ""
