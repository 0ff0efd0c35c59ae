"""DEV102 stray-context: a rank holds a CUDA context on a device that is not its own.

What it does
    Lists the devices on which each process holds a context at its end. One more than its own is a warning.

Why it is bad
    Every context costs 300 to 600 MB. With 8 ranks the 7 stray ones take 2 to 4 GB of GPU 0, whose rank then runs out of memory first.

Wrong
    state = torch.load(path)                      # loads onto the device of the rank that saved: GPU 0
    x.cuda(); torch.cuda.set_device(local_rank)   # too late

Right
    torch.cuda.set_device(local_rank)             # first of all
    state = torch.load(path, map_location="cpu")

Known limits
    Contexts that native libraries make by themselves are seen, but not who made them.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check
from harness.checks.dev import tables
from harness.checks.lau import blame
from harness.model import Finding, Severity
from harness.record import Run


class StrayContext(Check):
    code = "DEV102"
    name = "stray-context"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        found = tables.used(run)
        stray = [one for one in found if set(one.contexts) - {one.current} and not one.recording.of("data_parallel")]
        if not stray:
            return
        first = stray[0]
        others = sorted(set(first.contexts) - {first.current})
        calls = [e for e in first.recording.of("set_device") if e["device"] in others] or first.recording.of("set_device")[-1:]
        ranks = [one.rank for one in stray]
        alone = len(ranks) == 1
        yield self.finding(
            f"{blame.plural(ranks)} hold{'s' if alone else ''} a context on device {others[0]} beside {'its' if alone else 'their'} own",
            where=calls[0].where if calls else None,
            ranks=ranks,
            notes=[f"rank {one.rank}: device {one.current}, contexts on {list(one.contexts)}" for one in stray[:8]] + tables.note(found),
            help='call `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))` first of all, and load with map_location="cpu"',
        )
