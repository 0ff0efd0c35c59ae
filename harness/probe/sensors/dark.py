"""Steps that leave no row (protocol.kept; from the 1,024th on, most): what others count on is counted, nothing is read and nothing is told.

A look costs several times what it costs in a warm loop, because the step before it has emptied the caches: the fewer lines run, the better.
"""

from __future__ import annotations

from typing import Any

from .. import marks, protocol
from ..patching import quiet
from ..state import S, SinceStep, seq
from . import graphs, queue

under_way: dict[int, int] = {}  # id of an optimizer that is inside a step without digests -> flags so far
_row_at = [0]  # the next step that leaves a row
_watch = quiet(graphs.watch)
MANY_BACKWARDS = 64  # without a step: what steps by hand would never come back into the light


def before_step(optimizer: Any) -> None:
    under_way.clear()
    under_way[id(optimizer)] = 0


def after_step(optimizer: Any) -> None:
    S.steps_by_optimizer += 1
    marks.of(optimizer).num_steps += 1
    if S.steps + 1 < _row_at[0]:
        S.steps = S.recorder.steps = S.steps + 1
        S.since.num_backward = S.since.num_reduce = 0
    else:
        close()
        S.since.queue = queue.waited_s()  # the next step leaves a row: its time in the run queue begins now


def close() -> None:
    """The step is over, and the next is light or dark."""
    S.steps = S.recorder.steps = step = S.steps + 1
    S.light = not protocol.witnessed(step)
    _row_at[0] = protocol.next_kept(step)
    S.dark = step < _row_at[0] and S.steps_by_optimizer > 0
    S.recorder.progress()
    S.since = SinceStep()


def backward(original: Any, loss: Any, args: Any, kwargs: Any) -> Any:
    """The hang watch sees it, collectives count, and the open loops over a loader know that their batch was trained on."""
    recorder, since = S.recorder, S.since
    if loss.grad_fn is not None and not graphs.idle():
        _watch(loss, "train")
    recorder.enter("backward", None)
    seq_before, python_before = seq(), since.python_seq
    S.in_backward += 1
    try:
        result = original(loss, *args, **kwargs)
    finally:
        S.in_backward -= 1
    recorder.leave()
    S.backwards += 1
    since.num_backward += 1
    if since.num_backward >= MANY_BACKWARDS:
        S.dark = False
    if seq() - seq_before > since.python_seq - python_before:
        recorder.syncs += 1
        since.num_reduce += 1
    if S.loops or S.let_go:
        _tell_loops()
    return result


@quiet
def _tell_loops() -> None:
    for loop in S.loops:
        loop.note_backward()
    if S.let_go:
        S.let_go[0].settle()


def arm() -> None:
    """Nothing to patch: steps.py and backward.py come here."""
