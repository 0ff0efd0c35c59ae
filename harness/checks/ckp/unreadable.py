"""CKP112 checkpoint-unreadable: a checkpoint file is cut off or damaged.

What it does
    Looks for a `torch.load` that failed on the file itself: an archive without its end, a pickle that stops in the middle.

Why it is bad
    A run that was killed while it saved leaves such a file under the name of the last checkpoint, and with it the way to resume is gone.

Wrong
    torch.save(state, "last.pt")              # a kill in here destroys the last good checkpoint

Right
    torch.save(state, "last.pt.tmp")
    os.replace("last.pt.tmp", "last.pt")      # the old file or the new one, never half of one

Known limits
    A file that is written by several ranks at once, or read while another rank writes it, is CKP101's and CKP102's. Where the script
    catches the error and goes on, this is advice.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files
from harness.model import Finding, Severity
from harness.record import Run


class CheckpointUnreadable(Check):
    code = "CKP112"
    name = "checkpoint-unreadable"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU122", "HNG*")

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [load for load in files.loads(run) if load.end is not None]
        if not loads:
            raise NotApplicable("nothing is loaded with torch.load")
        broken = [load for load in loads if load.broken]
        for path in dict.fromkeys(load.path for load in broken):
            group = [load for load in broken if load.path == path]
            fatal = any(_ended_by(run, load) for load in group)
            size = group[0].end["size"] if group[0].end is not None else None
            yield self.finding(
                f"{files.name(path) or 'a buffer'} is no complete checkpoint: {group[0].error.splitlines()[0][:120]}",
                where=group[0].begin.where,
                ranks=sorted({load.rank for load in group}),
                notes=[f"{files.short(path)} has {size} bytes"] if isinstance(size, int) and size >= 0 else [],
                help="resume from an older file; write checkpoints to a temporary name and `os.replace` them to the final one",
                severity=None if fatal else Severity.ADVICE,
                evidence={"path": path, "size_bytes": size},
            )


def _ended_by(run: Run, load: files.Load) -> bool:
    """Whether the script died of it."""
    recording = run.ranks[load.rank]
    first, kind = load.error.splitlines()[0][:60], load.end["error_type"] if load.end is not None else None
    failures = recording.of("failure") if recording is not None else ()
    return any(first in str(e["message"]) or (not e["message"] and e["type"] == kind) for e in failures)  # an empty file's EOFError says nothing
