"""What Slurm says of a job: asked now and then, by a client that is never waited for.

`scontrol show job` knows a job until some minutes after its end; then `sacct` does, where the site keeps accounts. A cluster whose controller is
away makes clients wait for minutes, so each is ended after 20 s and asked again.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

CLIENT_LIMIT_S = 20.0
WAITING = frozenset(["PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"])
ENDED = frozenset([
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "REVOKED", "GONE",
])  # fmt: skip
UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)
GONE = "GONE"  # ours: nobody knows the job any more


@dataclass(frozen=True)
class JobState:
    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def ended(self) -> bool:
        """A word that we do not know is none: releases add words for jobs that go on (EXPEDITING in 26.05), while the ends have stayed the same."""
        return self.state in ENDED


def parse_scontrol(text: str) -> JobState | None:
    """The first record of `scontrol --oneliner show job`."""
    fields = dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", text.split("\n", 1)[0]))
    if "JobState" not in fields:
        return None
    nodes = "" if fields.get("NodeList", "") in ("(null)", "") else fields["NodeList"]
    restarts = fields.get("Restarts", "0")
    return JobState(fields["JobState"], _known(fields.get("Reason", "")), nodes, int(restarts) if restarts.isdecimal() else 0)


def _known(reason: str) -> str:
    return "" if reason in ("None", "(null)") else reason


def parse_sacct(text: str) -> JobState | None:
    """`sacct -X -n -P -o State,NodeList,WorkDir`: "CANCELLED by 1000|n1|/shared/me"."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    state, nodes = [*lines[0].split("|"), ""][:2]
    word, _, rest = state.partition(" ")
    return JobState(word, rest, "" if nodes.strip() == "None assigned" else nodes.strip())


class Client:
    """One question at a time, asked in the background."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0.0
        self.busy = False  # asked, and the answer not taken yet

    def ask(self, words: Sequence[str]) -> None:
        self._asked, self.busy = time.monotonic(), True
        with contextlib.suppress(OSError):  # no such client: the answer is that there is none
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def answer(self) -> tuple[int, str] | None:
        """(exit code, what it printed); None while it is at it."""
        process = self._process
        if process is None:
            self.busy = False
            return 127, ""
        if process.poll() is None:
            if time.monotonic() < self._asked + CLIENT_LIMIT_S:
                return None
            process.kill()
        output, _ = process.communicate()
        self._process, self.busy = None, False
        return process.returncode, output.decode("utf-8", "replace")


class Inquiry:
    """The state of one job, as last heard."""

    def __init__(self, job_id: str, folder: str = "") -> None:
        """`folder`: where it was submitted, to tell it from a later job of the same number; "" where there was no time for one."""
        self.job_id, self._folder = job_id, folder
        self.last: JobState | None = None
        self._client = Client()
        self._asks = ""
        self._next = 0.0
        self._num_answers = 0

    def poll(self, pressing: bool) -> JobState | None:
        """Moves on without waiting. `pressing`: the run has ended or was cancelled, so Slurm's word is all that is missing."""
        if self._client.busy:
            self._hear()
        elif time.monotonic() >= self._next:
            self._asks = "scontrol"
            self._client.ask(["scontrol", "--oneliner", "show", "job", self.job_id])
        elif pressing:
            self._next = min(self._next, time.monotonic() + 0.3)
        return self.last

    def _hear(self) -> None:
        heard = self._client.answer()
        if heard is None:
            return None
        code, text = heard
        found = parse_scontrol(text) if self._asks == "scontrol" else parse_sacct(text) if code == 0 else None
        if found is None and self._asks == "scontrol" and UNKNOWN_JOB.search(text):
            self._asks = "sacct"  # it ended longer ago than slurmctld remembers
            return self._client.ask(["sacct", "-j", self.job_id, "-X", "-n", "-P", "-o", "State,NodeList,WorkDir"])
        if found is not None and self._is_another(text):
            found = JobState(GONE)
        if self._asks == "sacct" and (found is None or not found.ended):  # accounts may hold a job to be running for ever (sacctmgr show runaway)
            found = JobState(GONE)
        self.last = found or self.last
        self._next = time.monotonic() + self._pause()
        return None

    def _is_another(self, text: str) -> bool:
        """Whether Slurm speaks of a job that was submitted elsewhere: numbers come again, after a wrap or on a new cluster."""
        before = "WorkDir=" if self._asks == "scontrol" else r"\|"
        return bool(self._folder) and before.strip("\\") in text and not re.search(rf"{before}{re.escape(self._folder)}(\s|$)", text)

    def _pause(self) -> float:
        """A minute of questions at the start, then few: what matters comes from the ranks' own files."""
        state = self.last
        if state is None or state.ended:
            return 1.0
        self._num_answers += 1
        return min(15.0, 0.5 + self._num_answers / 8)
