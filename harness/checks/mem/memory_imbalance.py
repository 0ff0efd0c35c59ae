"""MEM104 memory-imbalance: one rank needs far more memory than the others.

What it does
    Compares the peak of each rank (CUDA: allocated memory; else resident memory) with the median of all. At least 256 MB and 1.5 times
    more is a warning, at least 128 MB and 1.3 times more is advice. So is what two copies of the trained parameters account for: a running
    average of the weights (EMA) or a checkpoint in memory, kept on one rank, is a choice.

Why it is bad
    The largest rank decides what fits: the others leave that memory unused. On rank 0 it is often the whole data set, gathered outputs,
    or other ranks' checkpoints loaded onto its device.

Wrong
    everything = load_all() if rank == 0 else None      # kept for ever
    torch.load(path)                                    # on every rank, onto GPU 0

Right
    each rank loads its share; torch.load(path, map_location="cpu")

Known limits
    The line is where the rank stood at one of ten looks a second: an allocation that takes less time is told at a line behind it.
    Roles that differ by design (parameter servers, pipeline stages) look the same. Ranks of different hosts are compared too.
    Not compared without a GPU: a rank that starts the others itself, and they; they share other parts of the interpreter.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.mem import series
from harness.model import Finding, Severity, Where
from harness.record import Recording, Run, where_of

STRONG, WEAK = (256 * series.MB, 1.5), (128 * series.MB, 1.3)
MEANT_COPIES = 2.2  # of the parameters: an average of the weights and the best ones so far, with what the allocator adds
BYTES = {"float64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1}


class MemoryImbalance(Check):
    code = "MEM104"
    name = "memory-imbalance"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        peaks = {rank: peak for rank, r in enumerate(run.ranks) if r is not None and (peak := peak_bytes(r)) > 0}
        if len(peaks) < 2:
            raise NotApplicable("fewer than two ranks told about their memory")
        if len({r.role for r in run.present}) > 1 and not any(any(r.column("cuda_alloc_bytes")) for r in run.present):
            raise NotApplicable("one rank started the others: its interpreter was not started like theirs, and shares other memory")
        top = max(peaks, key=lambda rank: peaks[rank])
        middle = statistics.median(peak for rank, peak in peaks.items() if rank != top)
        more, ratio = peaks[top] - middle, peaks[top] / middle
        strong = more >= STRONG[0] and ratio >= STRONG[1]
        if strong or (more >= WEAK[0] and ratio >= WEAK[1]):
            recording = run.ranks[top]
            copies = more / size if recording is not None and (size := parameter_bytes(recording)) else 0.0
            meant = 0 < copies <= MEANT_COPIES
            yield self.finding(
                f"rank {top} needs {peaks[top] / 1e6:.0f} MB, {ratio:.1f} times as much as the others",
                where=_first_growth(recording) if recording is not None else None,
                ranks=[top],
                severity=None if strong and not meant else Severity.ADVICE,
                notes=[
                    ", ".join(f"rank {rank} {peak / 1e6:.0f} MB" for rank, peak in sorted(peaks.items())[:8]),
                    *([f"the difference is {copies:.1f} times the trained parameters: an average of the weights would be one"] if meant else []),
                ],
                help="look at what only this rank holds, and free it or share it out",
            )


def parameter_bytes(recording: Recording) -> int:
    """Of all optimizers, each as it was told last; 0: not known."""
    last = {repr(e["opt"]): e for e in recording.of("params")}
    sized = [zip(e["numels"] or (), e["dtypes"] or (), strict=False) for e in last.values()]
    return sum(num * BYTES.get(str(dtype).removeprefix("torch."), 4) for entries in sized for num, dtype in entries if isinstance(num, int))


def peak_bytes(recording: Recording) -> int:
    """The largest memory seen at a step or by a sample."""
    cuda = series.numbers(recording, "cuda_alloc_bytes")[1]
    if any(cuda):
        return max(cuda)
    rows = max(series.numbers(recording, "rss_bytes")[1], default=0)
    samples: list[int] = [
        s[1]
        for e in recording.of("rss")
        if isinstance(e["samples"], list)
        for s in e["samples"]
        if isinstance(s, list) and len(s) > 1 and isinstance(s[1], int)
    ]
    return max([rows, *samples])


def _first_growth(recording: Recording) -> Where | None:
    """The line in which this rank grew most between two samples."""
    best: tuple[int, Where] | None = None
    for event in recording.of("rss"):
        for entry in event["grown"] if isinstance(event["grown"], list) else []:
            where = where_of(entry[0]) if isinstance(entry, list) and len(entry) == 2 else None
            if where is not None and isinstance(entry[1], int) and (best is None or entry[1] > best[0]):
                best = (entry[1], where)
    return best[1] if best is not None else None
