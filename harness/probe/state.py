"""What this process remembers between two hooks. One instance, `S`, reset in a forked child."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .recorder import Recorder
    from .sites import Site

MASK = (1 << 64) - 1


def mix(digest: int, value: int) -> int:
    """Order-dependent 64-bit mixing (FNV-1a on words): plain sums and XOR cancel."""
    return ((digest ^ (value & MASK)) * 0x100000001B3 + 0x9E3779B97F4A7C15) & MASK


class SinceStep:
    """Sums since the end of the last optimizer step. Made at every step: what is zero stays in the class until somebody counts."""

    coll = index = batch = draws = 0
    num_coll = num_reduce = num_backward = num_forward = num_batches = num_samples = 0
    python_seq = 0
    data_s = coll_s = backward_s = 0.0
    first_sync = 0.0  # perf_counter at the first collective or backward; 0: none yet
    grad_norm = float("nan")
    scale = 0.0
    queue = 0.0  # run queue seconds of the process when the last step ended
    self_queue = 0.0  # of the step's own work: seconds of it in the run queue
    zeroed = False
    last_no_sync = False
    eval_backward = False
    given = False  # the last backward was handed a gradient
    joined = False  # a collective was given a tensor that has a graph: the ranks' losses are one
    step_began = 0.0

    def __init__(self) -> None:
        self.start = time.perf_counter()


class AtWork(threading.local):
    """Whether the probe itself works in this thread."""

    yes = False


class State:
    """Everything that hooks share. Not thread-safe by itself: python-level hooks hold the GIL, and sums may be off by one there."""

    def __init__(self) -> None:
        self.recorder: Recorder = None  # type: ignore[assignment]  # set by arm() before any hook exists
        self.at_work = AtWork()
        self.reset()

    @property
    def busy(self) -> bool:
        """The probe itself is at work in this thread: its own torch calls are not observed. Other threads are: a loader that is drained in a
        thread of the user's must not hide a step of the main thread."""
        return self.at_work.yes

    @busy.setter
    def busy(self, value: bool) -> None:
        self.at_work.yes = value

    def reset(self) -> None:
        self.since = SinceStep()
        self.steps = 0
        self.dark = False  # this step leaves no row (protocol.kept): hooks do what others depend on and no more
        self.light = False  # this step carries no digests (protocol.witnessed): hooks take their short way
        self.group: Any = None  # the default process group, once it exists
        self.in_collective = 0
        self.in_backward = 0
        self.in_hook = 0  # inside a communication hook of DDP
        self.loss: Any = None  # detached scalar of the last backward
        self.loss_scale = 1.0  # the factor of a GradScaler that is on it
        self.loss_site: Site | None = None
        self.graphs_alive = 0
        self.sched_steps = 0
        self.ddps: list[Any] = []  # sensors/ddp.Wrapped, in order of construction
        self.loops: list[Any] = []  # sensors/loader.Pass that are open
        self.let_go: list[Any] = []  # those whose iterator is gone with a batch that no backward has followed yet
        self.probe_s = 0.0
        self.steps_by_optimizer = 0
        self.batch_rows = 0  # first dimension of the last batch that went through a wrapped model or came from a loader
        self.backwards = 0  # in all
        self.collectives = 0
        self.compiling = False  # torch.compile or torch.export was called: no global module hooks

    def reset_for_child(self) -> None:
        """After a fork: counts start anew; what the parent wrapped (DDP objects, group) is not the child's."""
        compiling = self.compiling
        self.reset()
        self.compiling = compiling


S = State()


def seq() -> int:
    """Sequence number of the default group; -1: there is none (0.2 us)."""
    group = S.group
    if group is None:
        return -1
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return -1
