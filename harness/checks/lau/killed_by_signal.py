"""LAU102 killed-by-signal: a rank was ended by a signal that the launcher did not send.

What it does
    Looks at how each rank ended. SIGSEGV, SIGABRT, SIGBUS and the like come from native code, SIGKILL from outside. The line is that of
    the Python frame in which it died, where the rank could still write it. An error. Advice where the script had come to its end, and C++ then
    says "terminate called without an active exception".

Why it is bad
    There is no traceback: torchrun prints "Signal 6 (SIGABRT)" and the line is lost. An abort in gloo means in most cases that the ranks
    did not pass the same sizes to a collective.

Wrong
    if p.grad is not None:
        dist.all_reduce(p.grad)      # a gradient is None on one rank only: sizes no longer match, the other rank aborts

Right
    grad = p.grad if p.grad is not None else torch.zeros_like(p)
    dist.all_reduce(grad)

Known limits
    Who sent a SIGKILL is not recorded by Linux, so it is known only where the script itself did (os.kill in a rank); where the kernel
    counted an out-of-memory kill, LAU103 says so. That a thread of torch's outlives `destroy_process_group` and aborts the interpreter at its end
    happens to healthy scripts on busy machines; the launcher still counts the rank as failed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from harness import frames
from harness.checks.base import Check, NotApplicable
from harness.checks.lau import blame, oom
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Run

AT_EXIT = "terminate called without an active exception"
SAID = re.compile(
    r"(terminate called after throwing.*|what\(\):.*|.*(Check failed|Assertion).*|.*EnforceNotMet.*|.*op\.preamble\.length.*)",
    re.IGNORECASE,
)


def dying_frame(log: str) -> Where | None:
    """Where the process was when it died."""
    return next(iter(frames.dumped(log)), None)


def _at_its_end(run: Run, rank: int, log: str) -> bool:
    """Whether the script was through, and every other rank's too: nothing but the interpreter's own end was left."""
    return AT_EXIT in log[-8000:] and all(r.of(protocol.END) and not r.of("failure") for r in run.present) and rank in run.rank_ids


class KilledBySignal(Check):
    code = "LAU102"
    name = "killed-by-signal"
    severity = Severity.ERROR
    substantial = False
    explains = ("LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.live:
            raise NotApplicable("the run has not ended")
        fall = blame.culprit(run)
        if fall is None or fall.kind != "signal" or fall.exit is None or oom.killed(run, fall) is not None:
            return
        number = -fall.exit.code
        name = signal.Signals(number).name if number in {int(s) for s in signal.Signals} else f"signal {number}"
        log = run.logs.get(fall.rank, "")
        said = SAID.findall(log[-8000:])
        notes = [*(f"it said: {said[-1][0].strip()[:300]}" for _ in said[:1]), *blame.others(run, fall)]
        sent = blame.sender(run, fall.exit)
        if sent is not None:
            notes.append(f"rank {sent[0]} sent it itself" if sent[0] == fall.rank else f"rank {sent[0]} sent it")
        elif number == signal.SIGKILL:
            notes.append(
                "the kernel counted no out-of-memory kill while it ran" if oom.watched(run) else "whether memory ran out is not known"
            )
        if number == signal.SIGABRT and _at_its_end(run, fall.rank, log):
            yield self.finding(
                f"rank {fall.rank} was aborted while its interpreter ended, after the script's last line",
                ranks=[fall.rank],
                notes=["it said: terminate called without an active exception"],
                help="a thread of torch's process group outlived it: import torch.distributed.nn.functional before init_process_group, or run it again",
                severity=Severity.ADVICE,
            )
            return
        yield self.finding(
            f"rank {fall.rank} was killed by {name}",
            where=(sent[1].where if sent is not None else None) or dying_frame(log) or fall.where,
            ranks=[fall.rank],
            notes=notes,
            help=self._help(number),
        )

    def _help(self, number: int) -> str:
        if number == signal.SIGABRT:
            return "compare what the ranks pass to the collective on this line: sizes and dtypes must be the same on all of them"
        if number == signal.SIGBUS:
            return "look at /dev/shm: a full one ends processes by SIGBUS; use fewer workers or mount it larger"
        if number == signal.SIGKILL:
            return "look who ends it: a limit of the batch system, or memory"
        return "run this rank alone under a debugger (--launcher inline); an extension module or a mismatch of versions is the usual reason"
