"""A quiet thread: answers requests for stacks, notes standstills, samples resident memory with the user's line ten times a second.

It is started before the first process group, at the first step and in processes that the script makes, by _thread, so that
`threading.enumerate()` shows the script what it would show without us. A sample costs about 30 us.
Event "stacks": request, op, op_site, phase, threads {name: [site...]} innermost first: all frames of the user's code and the innermost of
any.
Event "stall" (no progress for 1, 2, 4, ... s): op, op_site, phase, stalled_s, stack [site...] of the main thread, inner (its innermost
function), flushing (it is at its exit and waits until its queue is read), ways (of a forward of DDP: what decides whether it is reached, see
conditions.py), consumer (in a collective: the loop over a generator that it stands in, see generators.py).
Event "rss": samples [[t_ns, bytes, of them file-backed or shared]], grown [[site, bytes]] (growth by the line that the main thread was
in); only while memory moves.
Event "keepers" (resident memory grew by 8, 16, 32, ... MB since the 8th step): sites of statements in the training loop that add to a
container; caches [[site of the function, results kept]] of lru_caches that keep tensors and were never hit; unfilled_bytes (in deques whose
bound is not reached yet); grown, and of that filled, held, kept (bytes, see heap.py); stored (bytes that Python holds, see stored.py); shapes
(see newshapes.py).
Event "profile" (every minute of training and at the end): samples, lines [[site, samples in which the main thread was there, in no
collective and no backward]], load (1 minute load average of the host).
Event "oom_kills" (the kernel's counter has risen since this process began): scope ("cgroup" | "host"), num.
"""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from typing import Any

from .. import conditions, generators, heap, hitless, keepers, newshapes, protocol, sites, stored
from ..arm import at_close
from ..patching import before
from ..state import S
from . import memory, threads

PERIOD_S = 0.1
STALL_S = 1.0
SAMPLES_AN_EVENT = 20
OWN_OPS = (b"", b"data")  # what a rank does by itself
KEEPERS_BYTES = 8_000_000
MOVED_BYTES = 256 * 1024
SLOW_AFTER = 6000  # samples (10 minutes); from then on one a second
_started: dict[int, bool] = {}
_answered = [""]
_live: list[Beat] = []


def start(*_args: Any, **_kwargs: Any) -> None:
    """Once a process."""
    pid = os.getpid()
    if _started.get(pid) or S.recorder.disabled:
        return
    _started[pid] = True
    beat = Beat(S.recorder)
    _live[:] = [beat]
    S.recorder.beats = True
    _thread.start_new_thread(beat.run, ())


class Beat:
    """What the thread remembers between two looks."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder
        self.request = os.path.join(recorder.run_dir, protocol.STACKS_REQUEST)
        self.moved = (recorder._progress, time.monotonic())
        self.tell_after_s = STALL_S
        self.samples: list[tuple[int, int, int]] = []
        self.grown: dict[sites.Site, int] = {}
        self.last_bytes = 0
        self.looks = 0
        self.lines: dict[sites.Site, int] = {}
        self.profiled = 0
        self.base_bytes, self.base_heap = 0, heap.NONE  # at the 8th step
        self.tell_keepers_at = KEEPERS_BYTES
        self.kills = memory.oom_kills()

    def run(self) -> None:
        while not self.recorder.closed and not sys.is_finalizing():
            time.sleep(PERIOD_S)
            try:
                self.look()
            except Exception:
                self.recorder.errors += 1

    def look(self) -> None:
        self.looks += 1
        self.publish()
        self.recorder.flush()
        self.answer()
        self.note_stall()
        if S.steps:
            self.profile()
        if self.looks < SLOW_AFTER or self.looks % 10 == 0:
            self.sample()
        if self.looks % 10 == 0:
            self.look_for_kills()
        if self.looks % 5 == 0 and S.steps:
            threads.look()

    def publish(self) -> None:
        recorder = self.recorder
        if recorder._late:
            unknown = recorder._op and not recorder._site
            recorder.publish(next(iter(main_stack()[0]), None) if unknown else None)

    def answer(self) -> None:
        if not os.path.exists(self.request):
            return
        with open(self.request, encoding="utf-8") as f:
            asked = f.read(64).strip()
        if asked and asked != _answered[0]:
            _answered[0] = asked
            self.recorder.event(protocol.STACKS, request=asked, threads=stacks(), **self.waiting())

    def waiting(self) -> dict[str, Any]:
        return {
            "op": self.recorder._op.decode("ascii", "replace"),
            "op_site": self.recorder._site.decode("utf-8", "replace"),
            "phase": self.recorder._phase.decode("ascii", "replace"),
        }

    def note_stall(self) -> None:
        now, progress = time.monotonic(), self.recorder._progress
        if progress != self.moved[0]:
            self.moved, self.tell_after_s = (progress, now), STALL_S
        elif now - self.moved[1] >= self.tell_after_s:
            self.tell_after_s *= 2
            frames, inner = main_stack()
            self.recorder.event(
                "stall", frames[0] if frames else None, stalled_s=round(now - self.moved[1], 2), inner=inner,
                stack=[sites.as_json(f) for f in frames[:8]], **({"flushing": True} if is_flushing() else {}), **self.waiting(), **self.branches(frames),
            )  # fmt: skip

    def branches(self, frames: list[sites.Site]) -> dict[str, Any]:
        """A forward of DDP is a collective that no call site tells of, and a call site's first stack need not be this one; read only where it stands still."""
        if self.recorder._op == b"ddp_forward":
            return {"ways": conditions.before(frames)["ways"]}
        return {"consumer": told} if self.recorder._op and (told := generators.consumer(frames)) is not None else {}

    def profile(self) -> None:
        self.profiled += 1
        if self.recorder._op in OWN_OPS:
            frames, _ = main_stack()
            if frames and len(self.lines) < 400:
                self.lines[frames[0]] = self.lines.get(frames[0], 0) + 1
        if self.profiled >= 600:
            self.tell_profile()

    def tell_profile(self) -> None:
        lines, self.lines, samples, self.profiled = self.lines, {}, self.profiled, 0
        if samples:
            top = sorted(lines.items(), key=lambda item: -item[1])[:16]
            told = [[sites.as_json(s), n] for s, n in top]
            self.recorder.event("profile", samples=samples, lines=told, load=round(os.getloadavg()[0], 2))

    def sample(self) -> None:
        now_bytes, shared_bytes = memory.resident()
        grown = now_bytes - self.last_bytes
        if abs(grown) < MOVED_BYTES:
            return
        if self.last_bytes and grown > 0:
            frames, _ = main_stack()
            if frames:
                self.grown[frames[0]] = self.grown.get(frames[0], 0) + grown
        self.last_bytes = now_bytes
        if S.steps >= 8:
            self.look_for_keepers(now_bytes)
        self.samples.append((time.time_ns(), now_bytes, shared_bytes))
        if len(self.samples) >= SAMPLES_AN_EVENT:
            self.tell()

    def look_for_keepers(self, now_bytes: int) -> None:
        if not self.base_bytes:
            self.base_bytes, self.base_heap = now_bytes, heap.now()
        if now_bytes - self.base_bytes >= self.tell_keepers_at and S.loss_site is not None:
            self.tell_keepers_at *= 4
            found = keepers.candidates(S.loss_site)
            caches = [[sites.as_json(site), num] for site, num in hitless.caches(S.steps)[:4]]
            told = [sites.as_json(s) for s in found[:8]]
            parts = {"grown": now_bytes - self.base_bytes, **heap.since(self.base_heap), "shapes": newshapes.count()}
            self.recorder.event("keepers", S.loss_site, statements=told, caches=caches, **stored.look(), **parts)

    def tell(self) -> None:
        samples, self.samples = self.samples, []
        grown, self.grown = self.grown, {}
        largest = sorted(grown.items(), key=lambda item: -item[1])[:6]
        if samples:
            self.recorder.event("rss", samples=samples, grown=[[sites.as_json(s), n] for s, n in largest])

    def look_for_kills(self) -> None:
        for scope, num in memory.oom_kills().items():
            if num > self.kills.get(scope, num):
                self.kills[scope] = num
                self.recorder.event("oom_kills", scope=scope, num=num)


def main_stack() -> tuple[list[sites.Site], str]:
    """(user frames of the main thread, innermost first; name of its innermost function of any kind)."""
    frame: Any = sites.beyond_ours(sys._current_frames().get(threading.main_thread().ident or 0))
    inner = frame.f_code.co_name if frame is not None else ""
    found: list[sites.Site] = []
    while (frame := sites.user_frame(frame)) is not None and len(found) < 8:
        found.append(sites.of_frame(frame))
        frame = frame.f_back
    return found, inner


def is_flushing() -> bool:
    """Whether the main thread has done its work and waits, at its exit, for what it put into a queue to be taken out."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_finalize_join" and frame.f_code.co_filename.endswith("queues.py"):
            return True
        frame = frame.f_back
    return False


def stacks() -> dict[str, list[Any]]:
    """All python threads of this process but ours."""
    me = threading.get_ident()
    titles = {t.ident: t.name for t in threading.enumerate()}
    found: dict[str, list[Any]] = {}
    for ident, top in sys._current_frames().items():
        if ident == me:
            continue
        frames: list[Any] = []
        frame: Any = sites.beyond_ours(top)
        while frame is not None and len(frames) < 40:
            code = frame.f_code
            if not frames or sites.is_user_code(code):
                frames.append(sites.as_json((code.co_filename, sites.line(frame), code.co_name)))
            frame = frame.f_back
        found[titles.get(ident, f"thread-{ident}")] = [f for f in frames if f]
    return found


def _finish() -> None:
    if _live and _live[0].recorder is S.recorder:
        _live[0].tell()
        _live[0].tell_profile()
        _live[0].look_for_kills()


def arm() -> None:
    """Started before init_process_group, so that a rendezvous that never ends is seen; else by the first step (devices.py)."""
    import torch.distributed as dist

    at_close.append(_finish)
    if dist.is_available():
        from torch.distributed import distributed_c10d as c10d

        if before(c10d, "init_process_group", start):
            dist.init_process_group = c10d.init_process_group
