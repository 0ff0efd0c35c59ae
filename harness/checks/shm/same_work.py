"""Whether workers that are fed alike do the same work: step the same parameters towards the same targets. A task, a head or a block of layers for
each on one batch is what multi-task training and block coordinate descent are."""

from __future__ import annotations

from collections.abc import Sequence

from harness.checks.dat import passes
from harness.record import Recording

NUM_ROWS = 16


def is_same(workers: Sequence[Recording]) -> bool:
    return len(workers) < 2 or (_same_parameters(workers) and _same_targets(workers))


def _same_parameters(workers: Sequence[Recording]) -> bool:
    """By name, and by which of them have a gradient."""
    if len({repr(sorted(repr((e["names"], e["shapes"])) for e in w.of("params"))) for w in workers}) > 1:
        return False
    lacking = [{(row.opt, row.none) for row in w.all_rows()[:NUM_ROWS] if row.none} for w in workers]
    return not all(lacking) or bool(set.intersection(*lacking))


def _same_targets(workers: Sequence[Recording]) -> bool:
    """Batch by batch; where a loss keeps none, the source may show that each takes something by its number."""
    told = [w.of("worker_aims")[:1] for w in workers]
    if not all(told):
        return True
    events = [e[0] for e in told]
    columns = [passes.unpack(e["digests"]) for e in events]
    seen = min(map(len, columns))
    if seen and all(0 not in c[:seen] for c in columns):
        return all(c[:seen] == columns[0][:seen] for c in columns)
    return not any(e["by_number"] is True for e in events)
