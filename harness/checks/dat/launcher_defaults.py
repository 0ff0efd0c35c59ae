"""Ranks that take one share because the variable that should tell them apart is not set by this launcher: each has its default."""

from __future__ import annotations

from dataclasses import replace

from harness.model import Finding
from harness.record import Run, where_of

HELP = "ask the process group (`dist.get_rank()`, `dist.get_world_size()`), or read what this launcher sets: RANK and WORLD_SIZE under torchrun"


def named(finding: Finding, run: Run) -> Finding:
    """A finding that the ranks' shares are one: at the read that made them so, if every rank has told of it."""
    told = [list(r.of("rank_default")) for r in run.present]
    reads = [e for e in told[0] if e.where is not None] if told and all(told) else []
    if not reads:
        return finding
    variables = " and ".join(f"{e['variable']} (line {e.where.line if e.where else 0}, default {e['default']})" for e in reads)
    cut = where_of(reads[0]["cut"])
    share = f"the share that {cut.place} takes" if cut is not None else "a rank's share"
    return replace(
        finding,
        message=f"{finding.message}, for each takes the default of {reads[0]['variable']}, which is not set here",
        where=reads[0].where,
        notes=(f"{share} comes from {variables}, not set here: every rank has the default", *finding.notes),
        help=HELP,
    )
