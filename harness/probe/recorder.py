"""Writes the recording of this process: events, step rows, per-parameter digests, the status page. Knows no torch.

Every write is one unbuffered os.write; digests of single parameters wait for it up to 0.1 s. The files are opened at the first thing to say, so that
processes that say nothing (data loader workers, helpers of multiprocessing) leave nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from . import protocol, sites

_SEQ = struct.Struct("<I")
PAGE_EVERY_NS = 200_000_000  # twice the beat's period: written here only where the beat does not get to it; 25 us
_ops: dict[str, bytes] = {}
_sites: dict[sites.Site, bytes] = {}


def _encoded(site: sites.Site) -> bytes:
    text = f"{site[0]}:{site[1]}:{site[2]}".encode("utf-8", "replace")[: protocol.STATUS_SITE_BYTES - 1]
    if len(_sites) < 4096:
        _sites[site] = text
    return text


MAX_DETAILS = 64  # that wait for the beat
FLUSH_S = 1.0  # on a file system that hangs nobody waits longer for the other's write
MAX_EVENTS_A_KIND = 3000  # then only counted; keeps a recording under 10 MB


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 where /proc does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return int(f.read().rsplit(b")", 1)[1].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


class Recorder:
    """One process's recording. A forked child makes a new one (see arm.after_fork)."""

    def __init__(self, run_dir: str, role: str) -> None:
        self.run_dir, self.role = run_dir, role
        self.pid = os.getpid()
        self.steps = 0
        self.closed = False
        self.disabled = False  # a data loader worker
        self.syncs = 0  # collectives and reducing backwards so far: equal counts on two ranks mean "nothing synchronised in between"
        self.errors = 0
        self.lost_steps = 0  # of which there is no row, because the probe failed there
        self._fds: dict[str, int] = {}
        self._rows_fd = -1
        self._counts: dict[str, int] = {}
        self._details: deque[tuple[int, int, list[int], list[int]]] = deque()
        self._flushing = threading.RLock()  # entered again where a signal handler of the script's ends the process in the middle of a write
        self._page: mmap.mmap | None = None
        self._page_ns = 0
        self._late = False  # the page lags behind
        self.beats = False  # a beat publishes what it lags behind; where none does, a call that blocks would never be seen
        self._status_seq = 0
        self._progress = 0
        self._phase = b"start"
        self._op = b""
        self.fallen = 0  # threads that ended by an exception
        self._op_since = 0
        self._site = b""
        self._stem = ""

    @property
    def stem(self) -> str:
        if not self._stem:
            node = os.environ.get(protocol.ENV_NODE) or os.environ.get("GROUP_RANK", "0")
            self._stem = f"{node if node.isdigit() else 0}-{self.pid}-{start_ticks(self.pid)}"
        return self._stem

    def _fd(self, suffix: str, magic: bytes = b"") -> int:
        fd = self._fds.get(suffix)
        if fd is None:
            path = os.path.join(self.run_dir, protocol.REC_DIR, self.stem + suffix)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
            self._fds[suffix] = fd
            if magic:
                os.write(fd, magic)
        return fd

    def event(self, kind: str, site: sites.Site | None = None, /, **fields: Any) -> None:
        """One event; values that JSON cannot hold are written as their repr. Never raises."""
        if self.disabled or self.closed:
            return
        count = self._counts[kind] = self._counts.get(kind, 0) + 1
        if count > MAX_EVENTS_A_KIND:
            return
        record: dict[str, Any] = {"k": kind, "t": time.time_ns(), "s": self.steps, "y": self.syncs}
        if site is not None:
            record["site"] = sites.as_json(site)
        record.update(fields)
        try:
            line = json.dumps(record, default=repr, separators=(",", ":")).encode("utf-8", "replace") + b"\n"
            if not self._fds and kind != protocol.START:
                self.start()
            os.write(self._fd(".jsonl"), line)
        except (OSError, ValueError, TypeError, RecursionError):
            self.errors += 1

    def start(self) -> None:
        """The first event: who this process is."""
        import sys

        def number(name: str) -> int:
            try:
                return int(os.environ[name])
            except (KeyError, ValueError):
                return -1

        self.event(
            protocol.START,
            pid=self.pid,
            ppid=os.getppid(),
            argv=[str(a)[:500] for a in getattr(sys, "argv", [])][:50],
            rank=number("RANK"),
            local_rank=number("LOCAL_RANK"),
            world_size=number("WORLD_SIZE"),
            attempt=max(0, number(protocol.ENV_ATTEMPT)),
            role=self.role,
            start_ticks=start_ticks(self.pid),
            python=sys.version.split()[0],
            host=os.uname().nodename,
            format=protocol.FORMAT,
            env={k: os.environ.get(k, "") for k in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")},
        )

    def row(self, packed: bytes, step: int) -> None:
        if self.disabled or self.closed or not protocol.kept(step):
            return
        try:
            fd = self._rows_fd
            if fd < 0:
                if not self._fds:
                    self.start()
                fd = self._rows_fd = self._fd(".rows", protocol.ROWS_MAGIC)
            os.write(fd, packed)
        except OSError:
            self.errors += 1

    def detail(self, step: int, opt: int, grads: list[int], params: list[int]) -> None:
        """Digests of each parameter and its gradient, at the few steps that have them. The beat writes them, ten times a second: they only name what
        differs where a row has told that something does, and 60 us are much for that."""
        if self.disabled or self.closed:
            return
        self._details.append((step, opt, grads, params))
        if len(self._details) >= MAX_DETAILS:
            self.flush()

    def flush(self) -> None:
        """Write the digests that wait; from the beat, from a step where they are many, and at the end, which waits for a write of the beat's."""
        if not self._flushing.acquire(timeout=FLUSH_S):
            return
        try:
            blob = b"".join(self._waiting())
            # what is behind a torn record would be misread
            if blob and not self.closed and os.write(self._fd(".params", protocol.PARAMS_MAGIC), blob) < len(blob):
                self._fds[".params"] = -1
        except OSError:
            self.errors += 1
        finally:
            self._flushing.release()

    def _waiting(self) -> Iterator[bytes]:
        while self._details:
            step, opt, grads, params = self._details.popleft()
            num = min(len(grads), 65_535)
            yield protocol.DETAIL.pack(step, opt, num) + struct.pack(f"<{2 * num}I", *grads[:num], *params[:num])

    # ---- status page ----
    # The page is for readers who look once a second: what changes within PAGE_EVERY_NS is left to the beat (sensors/beat.py), which publishes
    # ten times a second what it finds here. A call that blocks is on the page then, whether or not it was when it began.
    def progress(self) -> None:
        """Something moved: a batch, a collective, a forward, a step. Under 1 us."""
        self._progress += 1
        self._late = True
        if (now_ns := time.time_ns()) - self._page_ns >= PAGE_EVERY_NS:
            self._write_status(now_ns)

    @property
    def inside(self) -> bool:
        """Whether this process is in a call that can block."""
        return bool(self._op)

    def enter(self, op: str, site: sites.Site | None) -> None:
        """This process enters a call that can block. Without a site the beat finds out where, should it last. Under 1 us."""
        self._op = _ops.get(op) or _ops.setdefault(op, op.encode()[:32])
        self._site = b"" if site is None else _sites.get(site) or _encoded(site)
        self._op_since = now_ns = time.time_ns()
        self._late = True
        if not self.beats or now_ns - self._page_ns >= PAGE_EVERY_NS:
            self._write_status(now_ns)

    def leave(self) -> None:
        self._op = self._site = b""
        self._op_since = now_ns = time.time_ns()
        self._progress += 1
        self._late = True
        if not self.beats or now_ns - self._page_ns >= PAGE_EVERY_NS:
            self._write_status(now_ns)

    def publish(self, site: sites.Site | None = None) -> None:
        """From the beat: put on the page what has changed since it was written; `site` is where an operation is that did not say."""
        if self._late:
            if site is not None and self._op and not self._site:
                self._site = _encoded(site)
            self._write_status(time.time_ns())

    def phase(self, name: str) -> str:
        """The phase that it was before."""
        before, self._phase = self._phase.decode(), name.encode()[:16]
        self._write_status(time.time_ns())
        return before

    def _write_status(self, now_ns: int) -> None:
        """No lock: the text is copied under the GIL in one piece, so that two threads write one
        after the other; the number in front, odd until all is there, is for readers in other processes."""
        if self.disabled or self.closed:
            return
        try:
            self._page_ns, self._late = now_ns, False
            page = self._page
            if page is None:
                page = self._page = self._map_status()
            seq = self._status_seq = (self._status_seq + 2) & 0xFFFFFFFE
            _SEQ.pack_into(page, 0, seq + 1)
            site = self._site + b"\0"
            page[: protocol.STATUS.size + len(site)] = (
                protocol.STATUS.pack(
                    seq + 1, self.pid, now_ns, self._progress & 0xFFFFFFFF, self.steps & 0xFFFFFFFF, self._op_since, self._phase, self._op,
                    self.fallen,
                )
                + site
            )
            _SEQ.pack_into(page, 0, seq or 2)
        except (OSError, ValueError, struct.error):
            self.errors += 1

    def _map_status(self) -> mmap.mmap:
        if not self._fds:
            self.start()
        path = os.path.join(self.run_dir, protocol.REC_DIR, self.stem + ".status")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.pwrite(fd, bytes(protocol.STATUS_BYTES), 0)  # a hole that finds no room is SIGBUS at the first store; here it is an error
            return mmap.mmap(fd, protocol.STATUS_BYTES)
        finally:
            os.close(fd)

    def forget(self) -> None:
        """In a forked child: the parent's descriptors are not ours to write to; close our copies."""
        for fd in self._fds.values():
            try:
                os.close(fd)
            except OSError:
                pass
        self._fds.clear()
        self._rows_fd = -1
        self._page = None
        self.closed = True
