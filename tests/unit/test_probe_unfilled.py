"""The walk over all objects, in a thread of the probe's, finds deques and disturbs nobody who is making a tuple meanwhile."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque

from harness.probe import unfilled


def test_what_is_held_by_deques_that_are_not_full() -> None:
    before = unfilled.held_bytes()
    growing = deque((bytes(1000) for _ in range(40)), maxlen=100)
    full = deque((bytes(1000) for _ in range(40)), maxlen=40)
    assert unfilled.held_bytes() - before == 40_000
    assert len(growing) == len(full)
    assert gc.isenabled()


def test_nothing_of_the_walk_holds_an_object_afterwards() -> None:
    one = ([1],)
    before = sys.getrefcount(one)
    unfilled._deques()
    assert sys.getrefcount(one) == before


def test_a_tuple_that_is_made_meanwhile_comes_out_whole() -> None:
    """With a list of gc.get_objects() at hand between two lines of Python, one in twenty of these tuples failed."""
    others = [[i] for i in range(100_000)]  # what makes the walk long enough to be interrupted

    def walk() -> None:
        for _ in range(6):
            unfilled.held_bytes()

    thread = threading.Thread(target=walk)
    thread.start()
    lengths = set()
    while thread.is_alive():
        lengths.add(len(tuple(x for x in range(20_000))))
    thread.join()
    assert lengths == {20_000}
    assert len(others) == 100_000
