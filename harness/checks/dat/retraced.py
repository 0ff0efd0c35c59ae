"""Ranks that follow each other through the data: what one trains on, another had some batches before. From digests of the models' inputs.

Told from a healthy second pass over the data by what the others do meanwhile: here some rank still meets new batches, at the same steps.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from harness.checks.dat import passes
from harness.model import Where
from harness.record import Recording, Run, number, where_of

MIN_BATCHES = 8  # that a rank met after another had them
MAX_RANKS = 16


@dataclass(frozen=True)
class Retraced:
    """`follower` is fed at forward n + lag what `leader` was fed at forward n."""

    follower: int
    leader: int
    lag: int
    num: int
    of: int
    different: int  # batches among all that the ranks were fed
    fed: int
    made: Where | None


def find(run: Run) -> Retraced | None:
    """The first pair of ranks of which one retraces the other; None where each has data of its own, or goes over it again."""
    series = [_fed(r) for r in run.present[:MAX_RANKS]]
    num = min((_until_repeated(s) for s in series), default=0)
    if len(series) < 2 or num < MIN_BATCHES + 1:
        return None
    series = [s[:num] for s in series]
    fresh = _steps_with_news(series)
    for follower, own in enumerate(series):
        for leader, other in enumerate(series):
            found = _lag(own, other) if leader != follower else None
            if found is None:
                continue
            lag, met = found
            if len(met) >= MIN_BATCHES and len(met) >= 0.9 * (num - lag) and len(met & fresh) >= 0.9 * len(met):
                made = next((w for e in run.present[follower].of("fed") if (w := where_of(e["made"]) or e.where) is not None), None)
                different = len(set().union(*series))
                return Retraced(follower, leader, lag, len(met), num - lag, different, num * len(series), made)
    return None


def _fed(recording: Recording) -> list[int]:
    """Inputs of the first wrapped model, in order, as far as they are known without a gap."""
    found: list[int] = []
    for event in recording.of("fed"):
        if event["index"] == 0 and number(event["first"], -1) == len(found):
            found.extend(passes.unpack(event["digests"]))
    return found


def _until_repeated(series: list[int]) -> int:
    """How many batches a rank was fed before one came a second time."""
    seen: set[int] = set()
    for at, digest in enumerate(series):
        if digest in seen:
            return at
        seen.add(digest)
    return len(series)


def _steps_with_news(series: list[list[int]]) -> set[int]:
    """Forwards at which some rank was fed what none had been fed before."""
    seen: set[int] = set()
    found: set[int] = set()
    for at, now in enumerate(zip(*series, strict=True)):
        if any(digest not in seen for digest in now):
            found.add(at)
        seen.update(now)
    return found


def _lag(own: list[int], other: list[int]) -> tuple[int, set[int]] | None:
    """(commonest number of forwards by which `own` comes after `other`, the forwards of `own` at which it does)."""
    first = {digest: at for at, digest in enumerate(other)}
    after = [(at - first[digest], at) for at, digest in enumerate(own) if digest in first and first[digest] < at]
    if not after:
        return None
    lag = Counter(lag for lag, _ in after).most_common(1)[0][0]
    return lag, {at for own_lag, at in after if own_lag == lag}
