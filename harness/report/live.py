"""What the user sees while the script runs: rank 0's own lines, a progress line on a terminal, suspects.

Writing may fail at any time (the terminal is closed, the reader of the pipe leaves): the run goes on, and the report still says all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

from harness.model import Finding, Outcome, OutcomeKind, Plan
from harness.report import console
from harness.report.console import Style
from harness.report.text import clean

MAX_READ = 1 << 18  # bytes of a log taken at once: a script that floods its output must not hold up the watch
PLAIN_EVERY_S = 10.0  # between two progress lines where there is no terminal
BARS_EVERY_S = 1.0  # between two shown states of one progress bar


class Tail:
    """New whole lines of a growing log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._partial = b""
        self._quiet_until = 0.0

    def lines(self, final: bool = False) -> list[str]:
        """Lines that were completed since the last call; at the end also the one without a newline."""
        found: list[str] = []
        while chunk := self._read():
            *whole, self._partial = (self._partial + chunk).split(b"\n")
            found += [line.decode("utf-8", "replace") for line in whole]
            if not final:
                break
            if len(found) > 5000:
                found = [*found[:2500], "[... left out, see the log ...]", *found[-2500:]]
        if final and self._partial:
            found.append(self._partial.decode("utf-8", "replace"))
            self._partial = b""
        elif b"\r" in self._partial or len(self._partial) > MAX_READ:
            found += self._bar()
        return found

    def _bar(self) -> list[str]:
        """A progress bar repaints its line for ever: its last state, once a second."""
        now = time.monotonic()
        painted, _, rest = self._partial.rpartition(b"\r")
        self._partial = rest[-MAX_READ:]
        if now < self._quiet_until:
            return []
        self._quiet_until = now + BARS_EVERY_S
        return [painted.rpartition(b"\r")[2].decode("utf-8", "replace")]

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                chunk = file.read(MAX_READ)
        except OSError:
            return b""
        self._at += len(chunk)
        return chunk


class Live:
    """The console during a session; `stream` None: nothing is shown (another format has standard output)."""

    def __init__(self, stream: TextIO | None, style: Style, *, animate: bool = False, cwd: str = "") -> None:
        self.style, self.cwd = style, cwd
        self._stream = stream
        self._animate = animate
        self._painted = 0  # width of the progress line that stands on the terminal now
        self._last_plain = time.monotonic()

    # ---- lines

    def block(self, text: str) -> None:
        self._erase()
        self._write(text if text.endswith("\n") else text + "\n")

    def begin(self, plan: Plan) -> None:
        self._last_plain = time.monotonic()
        self.block(console.header(plan, self.style))

    def note(self, text: str) -> None:
        self.block(self.style.paint(f"note        {text}", "dim"))

    def folded(self, causes: Mapping[str, str]) -> None:
        """Suspects that are told under another finding in the end: code -> that finding's."""
        for code, cause in sorted(causes.items()):
            self.note(f"{code}, suspected while it ran, is folded under {cause}, which explains it")

    def taken_back(self, codes: Iterable[str], outcomes: Iterable[Outcome] = ()) -> None:
        """Suspects that the verdict does not hold: what was printed as one has to be unsaid; what could not be judged in the end stays open."""
        unjudged = {o.code: o for o in outcomes if o.kind in (OutcomeKind.INCONCLUSIVE, OutcomeKind.CRASHED)}
        suspected = sorted(codes)
        if listed := ", ".join(code for code in suspected if code not in unjudged):
            self.note(f"taken back: {listed}, suspected while it ran, which the whole recording does not show")
        for code in suspected:
            if (open_ := unjudged.get(code)) is not None:
                why = f": {open_.reason}" if open_.kind is OutcomeKind.INCONCLUSIVE and open_.reason else ""
                self.note(f"left open: {code}, suspected while it ran, which could not be judged at the end{why}")

    def script(self, rank: int, lines: list[str]) -> None:
        shown = [console.script_line(rank, line, self.style) for raw in lines for line in clean(raw).split("\n") if line.strip()]
        if shown:
            self._last_plain = time.monotonic()
            self.block("\n".join(shown))

    def suspect(self, finding: Finding) -> None:
        self.block(console.suspect_line(finding, self.style, self.cwd))

    # ---- progress

    def progress(self, text: str, elapsed_s: float) -> None:
        """On a terminal one line that is repainted; elsewhere a plain line where nothing was said for a while."""
        line = f"{elapsed_s:5.1f} s  {text}"
        if self._animate:
            line = line[: max(20, shutil.get_terminal_size().columns - 1)]
            self._write("\r" + line.ljust(self._painted))
            self._painted = len(line)
        elif time.monotonic() - self._last_plain >= PLAIN_EVERY_S:
            self._last_plain = time.monotonic()
            self.block(line)

    def _erase(self) -> None:
        if self._painted:
            self._write("\r" + " " * self._painted + "\r")
            self._painted = 0

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            _abandon(self._stream)
            self._stream = None

    def end(self) -> None:
        self._erase()


def _abandon(stream: TextIO) -> None:
    """Nobody reads any more. What is still buffered goes nowhere, or Python would fail on it at its end, with an exit code of its own."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def animated(environ: Mapping[str, str], is_tty: bool) -> bool:
    """A repainted line needs a terminal that can, and a person in front of it."""
    return is_tty and environ.get("TERM", "") != "dumb" and environ.get("CI", "").lower() in ("", "0", "false")
