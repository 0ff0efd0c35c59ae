"""Whether a run moves, seen from outside, and when standing still is a hang.

Something moves when any process enters or leaves a call that can block, draws a batch, runs a forward or a step. While nothing moves:

- every living process sits in a call that waits for others (or in its own end): a hang after `limit`;
- some process computes, or waits for its data, while another waits for it: slow, not hung, until three times that;
- ... and that process uses the CPU (compiling, evaluating) or is inside torch.save: until nine times that;
- a process of the run has ended and all others wait in collectives that it can no longer join: a hang after 3 s; those that began behind its end
  wait for others (a restart, the next trial);
- nobody waits, but a thread has ended by an exception, no process uses the CPU and none has a child: as slow, until three times that;
- nobody waits otherwise: never a hang, the wall limit is for that. A process that is alone waits for nobody in its backward.

`limit` is 20 s before the first step, afterwards the larger of 10 s and 20 times the p95 of the step time, and up to three times that on a
host whose cores others use. `--hang-timeout` sets it; only a process that saves or uses the CPU, or would if it got a core, stretches that one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.model import Plan
from harness.probe import protocol
from harness.watch.pages import Host, Page, Pages

FIRST_LIMIT_S, LIMIT_S, PACE = 20.0, 10.0, 20.0
SLOW, BUSY = 3.0, 9.0  # factors on the limit
DEAD_PEER_S = 3.0
BUSY_SHARE = 0.1  # of one core; a process that waits in gloo uses under 0.01
WANTED_SHARE = 0.3  # ... and wakes up too seldom to queue for a core that long
MOST_CROWDED = 3.0  # the limit is not stretched any further by the load
STALLED_S, STALLED_PACE = 5.0, 3.0  # at the wall limit: who stands still as long, and as many steps, would have gone on standing
OWN_WAITS = {"data"}  # waits that no other rank can end
LOCAL_OPS = {"backward", "ddp_forward"}  # communicate, but compute too: a dead peer does not prove that they wait
PURE_WAITS = {"barrier", "monitored_barrier", "destroy"}  # nothing is computed there: CPU used meanwhile is a thread's that helps nobody
MAX_PACES = 512


@dataclass(frozen=True)
class Moment:
    """One process right now."""

    rank: int
    pid: int
    step: int
    phase: str
    op: str  # the call it is in; "" while it computes, "exit" while it ends
    site: str
    age_s: float  # since it entered the call or left the last one
    alive: bool


@dataclass(frozen=True)
class Progress:
    moments: tuple[Moment, ...]
    step: int  # of the furthest process
    steps_per_s: float
    silent_s: float  # since anything moved
    limit_s: float  # how long that may last, as things are
    hung: bool
    stalled: bool  # not yet a hang, but what would have become one where the run is ended now


class Watch:
    """Reads the pages at each poll; keeps what the decision needs."""

    def __init__(self, run_dir: Path, plan: Plan, clock: Callable[[], float] = time.monotonic, host: Host | None = None) -> None:
        self._pages, self._plan, self._clock = Pages(run_dir, host), plan, clock
        self._moved_at = clock()
        self._state: Mapping[str, object] = {}
        self._cpu_s: dict[str, float] = {}  # of each process when something last moved
        self._delayed_s: dict[str, float] = {}  # the same of its waiting for a core
        self._paces: deque[float] = deque(maxlen=MAX_PACES)  # seconds a step, one for each poll that saw steps
        self._born: dict[str, float] = {}  # when each process was first seen
        self._gone: dict[str, float] = {}  # ... and when it was first seen to have ended
        self._stepped: tuple[float, int] | None = None  # when the furthest process last stepped, and how far it was

    def poll(self) -> Progress:
        now, pages = self._clock(), self._pages.read()
        step = max((page.status.step for page in pages), default=0)
        self._note_pace(now, step)
        for page in pages:
            self._born.setdefault(page.stem, now)
            if not page.alive:
                self._gone.setdefault(page.stem, now)
        state = {page.stem: (page.alive, page.status.progress, page.status.since_ns, page.status.phase, page.status.op) for page in pages}
        if state != self._state:
            self._state, self._moved_at = state, now
            self._cpu_s = {page.stem: self._used_s(page) for page in pages if page.alive}
            self._delayed_s = {page.stem: self._pages.host.delayed_s(page.stem) for page in pages if page.alive}
        silent_s = now - self._moved_at
        limit_s = self._limit_s(pages, silent_s)
        moments = tuple(_moment(page) for page in pages)
        stalled = limit_s < float("inf") and silent_s >= max(STALLED_S, STALLED_PACE * self._p95_s()) and not self._any_busy(pages, silent_s, 0.0)
        return Progress(moments, step, self._rate(), silent_s, limit_s, silent_s >= limit_s, stalled)

    # ---- pace

    def _note_pace(self, now: float, step: int) -> None:
        if self._stepped is None or step < self._stepped[1]:
            self._stepped = (now, step)
        elif step > self._stepped[1]:
            if self._stepped[1] > 0:  # the first steps hold imports, compiles and caches
                self._paces.append((now - self._stepped[0]) / (step - self._stepped[1]))
            self._stepped = (now, step)

    def _rate(self) -> float:
        recent = list(self._paces)[-8:]
        return len(recent) / sum(recent) if recent and sum(recent) > 0 else 0.0

    def _p95_s(self) -> float:
        ordered = sorted(self._paces)
        return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))] if ordered else 0.0

    # ---- the decision

    def _limit_s(self, pages: Sequence[Page], silent_s: float) -> float:
        """How long nothing may move, as things are; infinite where nobody waits."""
        living = [page for page in pages if page.alive and not self._only_waits_for_children(page, pages)]
        alone = len(living) == 1 and self._plan.world_size == 1
        waiting = [page for page in living if _waits(page) and not (alone and page.status.op in LOCAL_OPS)]
        if not waiting and not any(page.status.op in OWN_WAITS for page in living) and not self._fell_silent(living, silent_s):
            return float("inf")
        if self._plan.hang_timeout_s is not None:  # short ones are for tests: a loaded host must not make them lie
            limit_s = self._plan.hang_timeout_s
            return BUSY * limit_s if self._any_busy(living, silent_s, limit_s) else limit_s
        base = max(LIMIT_S, PACE * self._p95_s()) if any(page.status.step for page in pages) else FIRST_LIMIT_S
        base *= min(max(self._pages.host.load_per_core(), 1.0), MOST_CROWDED)
        if self._any_busy(living, silent_s, DEAD_PEER_S):
            return BUSY * base
        if len(waiting) < len(living) or self._unseen(pages):
            return SLOW * base
        children = {page.stem for page in pages if page.ppid in {each.pid for each in waiting}}  # a loader's workers end with their epoch
        began = min((self._born[page.stem] for page in waiting if page.status.op != "join"), default=float("inf"))
        dead = any(not page.alive and page.stem not in children and began <= self._gone[page.stem] for page in pages)
        return min(base, DEAD_PEER_S) if dead and not any(page.status.op in LOCAL_OPS or page.ended for page in living) else base

    def _fell_silent(self, living: Sequence[Page], silent_s: float) -> bool:
        """Whether a thread has ended by an exception, and nothing works any more: what it would have made is waited for where no call of ours shows it.
        A process below one of them may be what is waited for."""
        fallen = any(page.status.fallen for page in living)
        return fallen and not self._any_busy(living, silent_s, 0.0) and not any(self._pages.host.below_cpu_s(page.stem) for page in living)

    def _unseen(self, pages: Sequence[Page]) -> bool:
        """Whether a launched rank has not shown itself yet: it may still read its data."""
        return len({page.rank for page in pages if page.rank >= 0}) < self._plan.world_size

    def _any_busy(self, living: Sequence[Page], silent_s: float, after_s: float) -> bool:
        return silent_s >= after_s and any(self._is_busy(page, silent_s) for page in living)

    def _is_busy(self, page: Page, silent_s: float) -> bool:
        """Uses the CPU. A call that waits for a GPU spins there too: that is no work, but computing outside such a call is. A checkpoint that goes
        to a file server takes none."""
        if page.status.op in PURE_WAITS:
            return False
        if page.status.phase == protocol.SAVING and not page.status.op:
            return True
        used_s = self._used_s(page) - self._cpu_s.get(page.stem, 0.0)
        works = used_s > BUSY_SHARE * silent_s or used_s + self._delay_s(page) > WANTED_SHARE * silent_s
        return works and (not page.status.op or not self._pages.host.holds_gpu(page.stem))

    def _delay_s(self, page: Page) -> float:
        """Spent waiting for a core since something last moved."""
        return self._pages.host.delayed_s(page.stem) - self._delayed_s.get(page.stem, 0.0)

    def _used_s(self, page: Page) -> float:
        """CPU so far. One that joins its children works through them."""
        below_s = self._pages.host.below_cpu_s(page.stem) if page.status.op == "join" else 0.0
        return self._pages.host.cpu_s(page.stem) + below_s

    def _only_waits_for_children(self, page: Page, pages: Sequence[Page]) -> bool:
        """The parent of mp.spawn: it computes nothing while its children, recorded themselves, live."""
        return not page.status.op and any(other.ppid == page.pid and other.alive for other in pages)


def _waits(page: Page) -> bool:
    return page.ended or (bool(page.status.op) and page.status.op not in OWN_WAITS)


def _moment(page: Page) -> Moment:
    status = page.status
    age_s = max(0.0, (time.time_ns() - status.since_ns) / 1e9) if status.since_ns else 0.0
    return Moment(page.rank, page.pid, status.step, status.phase, "exit" if page.ended else status.op, status.site, age_s, page.alive)
