"""EVL101 under samplers other than torch's DistributedSampler: what the ranks draw together, and what they count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.evl.padding import EvalPaddingDuplicates
from harness.probe.datasets import pack
from harness.record import Event, Run

SIZE, BATCH = 45, 8
WHOLE = list(range(SIZE))
Shares = list[list[int]]


def by_turns(order: Sequence[int]) -> Shares:
    return [list(order[rank::2]) for rank in range(2)]


FILLED = by_turns([*WHOLE, *WHOLE[:3]])  # 48: whole batches on every rank


def evaluated(
    shares: Shares, counts: Callable[[int], list[list[float]]] | None = None, *, cut: bool | None = None, inside: bool = False, base: bool = False, **opened: Any
) -> Run:
    """One evaluation; `counts`: what a rank that drew so many samples reduces, call by call."""
    own = []
    for rank, drawn in enumerate(shares):
        indices = list(range(len(drawn))) if base else drawn
        subset = {"num": len(drawn), "of": SIZE, "indices": pack(drawn)} if base else None
        first = {"loop": 0, "made": site(20), "made_sampler": site(19), "made_dataset": [site(18)], "sampler": "RankSampler", "dataset_len": SIZE, "planned": 3,
                 "subset": subset, "custom_sampler": not base, "batch_size": BATCH}  # fmt: skip
        last = {"loop": 0, "num_batches": 3, "num_samples": len(drawn), "indices": pack(indices), "complete": True, "grad": False, "training": False,
                "batch_sizes": [BATCH, BATCH, BATCH], "backwards": 0}  # fmt: skip
        begin, end = event("loader", line=50, s=2, **(first | opened)), None
        events: list[Event] = [begin]
        if not inside:
            end = event("pass", line=50, s=2, **last)
            events.append(end)
        if cut is not None:
            events.append(event("gathered", line=54, s=2, op="all_gather", values=[], leaves=len(drawn), at=2, cut=cut))
        sums = [(counts or (lambda n: [[7.0, float(n)]]))(len(s)) for s in shares]
        for nth, before in enumerate(sums[rank]):
            after = [sum(s[nth][i] for s in sums) for i in range(len(before))]
            told = event("reduced", line=55, s=2, op="all_reduce", reduce="sum", before=before, after=after, at=2)
            told.data["at_t"] = told.t_ns  # type: ignore[index]
            events.append(told)
        own.append(recording([*events, *([] if end else [event("pass", line=50, s=2, **last)])], [row(0)], rank=rank))
    return run(own)


@pytest.mark.parametrize(
    "shares",
    [
        FILLED,
        by_turns([*WHOLE, *[44] * 3]),
        by_turns([*WHOLE, *WHOLE[-3:]]),
        by_turns([*WHOLE, 0]),  # equal shares
        [WHOLE[:24], [*WHOLE[24:], 0, 1, 2]],  # blocks
        [[*WHOLE[0::2], 44], [*WHOLE[1::2], 1, 3]],  # each rank fills up its own
        [[*WHOLE[:8], *WHOLE[16:24], *WHOLE[32:40]], [*WHOLE[8:16], *WHOLE[24:32], *WHOLE[40:], 0, 1, 2]],  # batch after batch
    ],
)
def test_a_sampler_that_fills_up(shares: Shares) -> None:
    (found,) = findings(EvalPaddingDuplicates, evaluated(shares))
    total = sum(map(len, shares))
    assert f"counts {total} samples, the data set has 45" in found.message and found.where is not None and found.where.line == 19


def test_other_counts() -> None:
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, lambda n: [[7.0, 7.0 * n]]))  # tokens
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, lambda n: [[2.0, 8.0]] * 3, inside=True))  # batch by batch
    (found,) = findings(EvalPaddingDuplicates, evaluated(FILLED, base=True))
    assert found.where is not None and found.where.line == 18


@pytest.mark.parametrize(
    "shares",
    [
        by_turns(WHOLE),  # shares of 23 and 22
        [WHOLE, WHOLE],  # every rank all of it
        by_turns([i for i in WHOLE for _ in range(4)]),  # augmented four times
        by_turns([*WHOLE, 5, 10, 15]),  # these weigh more on purpose
        by_turns([*WHOLE[:20], 3, 4, 5, *WHOLE[20:]]),
        [WHOLE[:24], WHOLE[21:]],  # windows that overlap, for their context
        by_turns([7 * i % 43 for i in range(48)]),  # drawn by chance: not all of the set
        by_turns([*WHOLE, *WHOLE[:1], *WHOLE[:6]]),  # no whole batches
    ],
)
def test_no_padding(shares: Shares) -> None:
    assert findings(EvalPaddingDuplicates, evaluated(shares)) == []


def test_padding_that_does_not_count() -> None:
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, lambda n: [[7.0, 22.5]])) == []  # cut on each rank
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, lambda n: [[7.0, 22.5, float(n)]])) == []  # the third is for the log
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, cut=True)) == []  # predictions are gathered, and may be cut
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, cut=False))
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, lambda n: [])) == []  # nothing is reduced
    assert findings(EvalPaddingDuplicates, evaluated(FILLED, replacement=True)) == []


@pytest.mark.parametrize("value", [None, "x", -1, 0, [], {}, [None], 1e400])
def test_forged(value: Any) -> None:
    findings(EvalPaddingDuplicates, evaluated(FILLED, **dict.fromkeys(("batch_size", "dataset_len", "subset", "made_sampler", "planned"), value)))
    findings(EvalPaddingDuplicates, evaluated(FILLED, lambda n: [[float("inf"), float("nan")]]))
