"""What of the growth is no growth of what the program holds."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from harness.probe import heap

MB = 1_000_000

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's map of this process and glibc's malloc")


def test_pages_of_an_old_block_that_are_touched_for_the_first_time() -> None:
    block = np.zeros(200 * MB, np.uint8)
    before = heap.now()
    block[: 50 * MB] = 1
    grown = heap.since(before)
    assert 45 * MB <= grown["filled"] <= 60 * MB and grown["held"] < 5 * MB


def test_a_new_block_is_held_and_fills_nothing() -> None:
    before = heap.now()
    kept = [np.ones(125_000) for _ in range(40)]  # 40 times 1 MB
    grown = heap.since(before)
    assert len(kept) == 40 and grown["held"] >= 38 * MB and grown["filled"] < 5 * MB


def test_what_lies_free_between_blocks_that_live_on_is_kept_by_malloc() -> None:
    before = heap.now()
    blocks = [np.ones(6_000) for _ in range(1_000)]  # 48 MB in blocks below malloc's threshold for a mapping of their own
    living = blocks[::20]
    del blocks
    grown = heap.since(before)
    assert len(living) == 50 and grown["kept"] >= 30 * MB and grown["held"] < 10 * MB
