"""All objects of some types that live: where something is held cannot be asked of what holds it."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from functools import partial, reduce
from typing import Any


def of(kinds: tuple[type, ...], *tests: Callable[[Any], Any]) -> list[Any]:
    """All that live, no subclasses, found in one call of C, in which no other thread can run: 0.1 s where torch and torchvision are loaded (330,000
    objects). `tests` are functions of C too, each is given what the one before has given, and the last tells whether the object is wanted. One of all
    objects may be a tuple that another thread is making out of an iterator, and that fails, with a SystemError in the script's own line, where it is not
    the only one who holds it: so nothing may hold the objects when that call is over. No collection in between either: it might run finalizers, which are
    Python."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return list(_found(frozenset(map(id, kinds)), tests))
    finally:
        if was_on:
            gc.enable()


def _found(kinds: frozenset[int], tests: tuple[Callable[[Any], Any], ...]) -> Iterator[Any]:
    """Nothing is called before the first is asked for. The list of all objects holds what holds it here, so it is cleared behind the last one found. Types
    are known by id: a metaclass may have an `__eq__` or `__hash__` in Python."""
    listed, asked, cleared = itertools.tee(map(gc.get_objects, (None,)), 3)
    types = map(partial(map, id), map(partial(map, type), asked))
    is_kind = map(partial(map, kinds.__contains__), types)
    found: Iterator[Any] = itertools.chain.from_iterable(map(itertools.compress, listed, is_kind))
    if tests:
        wanted, tested = itertools.tee(found)
        found = itertools.compress(wanted, reduce(lambda given, test: map(test, given), tests, tested))
    return itertools.chain(found, filter(None, map(list.clear, cleared)))  # clear() gives None
