"""SYN145 handle-not-waited: a tensor is used while its asynchronous collective may still be under way

What it does
    Follows the handle that `async_op=True` returns. A finding where an optimizer steps with a gradient whose handle nobody has waited for, or
    where the handle of another reduction or gather is thrown away unasked. A warning in the second case.

Why it is bad
    The call returns before the other ranks have answered. What is read then is the rank's own value, the sum, or half of each, as the machine
    has it: runs differ, replicas drift apart, and on a quick machine all looks well.

Wrong
    handles = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    optimizer.step()

Right
    handles = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for handle in handles:
        handle.wait()
    optimizer.step()

Known limits
    Looked for in the first 256 steps, on CPU tensors, at calls in the script's own code; on a device a synchronisation of the device waits as
    well. Broadcasts and point-to-point messages are not judged: who sends may go on.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run


class HandleNotWaited(Check):
    code = "SYN145"
    name = "handle-not-waited"
    severity = Severity.ERROR
    explains = ("SYN127", "SYN126", "SYN128", "SYN130", "SYN137", "SYN118", "OPT111", "OPT114", "EVL102", "LAU101", "LAU102")

    def end(self, run: Run) -> Iterable[Finding]:
        if not any(e["op"] for r in run.present for e in r.of("coll")):
            raise NotApplicable("the script calls no collective")
        told: dict[tuple[str, int], list[tuple[int, Event]]] = {}
        for recording in run.present:
            for event in recording.of("unwaited"):
                if event.where is not None:
                    told.setdefault((event.where.file, event.where.line), []).append((recording.rank, event))
        for of_line in told.values():
            yield self._found(of_line)

    def _found(self, of_line: list[tuple[int, Event]]) -> Finding:
        event = next((e for _, e in of_line if e["grad"]), of_line[0][1])
        what = (
            f"an optimizer steps with a gradient whose {event['op']} nobody has waited for"
            if event["grad"]
            else f"the handle of this {event['op']} is thrown away, and nobody has waited for it"
        )
        return self.finding(
            f"{what}: with async_op=True the call returns before the ranks have answered, and what the tensor holds by then is chance",
            severity=Severity.ERROR if event["grad"] else Severity.WARNING,
            where=event.where,
            ranks=sorted({rank for rank, _ in of_line}),
            notes=[f"a tensor of {event['numel']:,} values"],
            help="keep the handle and call `handle.wait()` before the tensor is read, or leave out `async_op=True`",
        )
