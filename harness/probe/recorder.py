"""Writes the recording of this process: events, step rows, per-parameter digests, the status page. Knows no torch.

Every write is one unbuffered os.write. The files are opened at the first thing to say, so that processes that say nothing
(data loader workers, helpers of multiprocessing) leave nothing.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from typing import Any

from . import protocol, sites

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
        self._fds: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._page: mmap.mmap | None = None
        self._status_seq = 0
        self._progress = 0
        self._phase = b"start"
        self._op = b""
        self._op_since = 0
        self._site = b""
        self._lock = threading.RLock()  # a signal handler of the user's may come here while this very thread holds it
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
            if not self._fds:
                self.start()
            os.write(self._fd(".rows", protocol.ROWS_MAGIC), packed)
        except OSError:
            self.errors += 1

    def detail(self, step: int, opt: int, grads: list[int], params: list[int]) -> None:
        num = min(len(grads), 65_535)
        body = struct.pack(f"<{2 * num}I", *grads[:num], *params[:num])
        try:
            os.write(self._fd(".params", protocol.PARAMS_MAGIC), protocol.DETAIL.pack(step, opt, num) + body)
        except OSError:
            self.errors += 1

    # ---- status page ----
    def progress(self) -> None:
        """Something moved: a batch, a collective, a forward, a step. Under 1 us."""
        self._progress += 1
        page = self._page
        if page is not None:
            struct.pack_into("<QI", page, 8, time.time_ns(), self._progress & 0xFFFFFFFF)

    def enter(self, op: str, site: sites.Site) -> None:
        """This process enters a call that can block."""
        self._op, self._op_since = op.encode()[:16], time.time_ns()
        self._site = f"{site[0]}:{site[1]}:{site[2]}".encode()[: protocol.STATUS_SITE_BYTES - 1]
        self._write_status()

    def leave(self) -> None:
        self._op, self._op_since, self._site = b"", time.time_ns(), b""
        self._progress += 1
        self._write_status()

    def phase(self, name: str) -> None:
        self._phase = name.encode()[:16]
        self._write_status()

    def _write_status(self) -> None:
        if self.disabled or self.closed:
            return
        with self._lock:
            try:
                if self._page is None:
                    self._page = self._map_status()
                self._status_seq += 2
                struct.pack_into("<I", self._page, 0, self._status_seq - 1)
                head = protocol.STATUS.pack(
                    self._status_seq - 1, self.pid, time.time_ns(), self._progress & 0xFFFFFFFF, self.steps, self._op_since, self._phase, self._op
                )
                self._page[: protocol.STATUS_BYTES] = head + self._site.ljust(protocol.STATUS_SITE_BYTES, b"\0")
                struct.pack_into("<I", self._page, 0, self._status_seq)
            except (OSError, ValueError, struct.error):
                self.errors += 1

    def _map_status(self) -> mmap.mmap:
        if not self._fds:
            self.start()
        path = os.path.join(self.run_dir, protocol.REC_DIR, self.stem + ".status")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.ftruncate(fd, protocol.STATUS_BYTES)
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
        self._page = None
        self.closed = True
