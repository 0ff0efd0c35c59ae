"""HNG106 dead-peer: a rank has ended in good order while others still wait for it.

What it does
    One rank left with exit code 0, the others wait in a collective or lost the connection to it; or a process that the script made itself
    has ended, and others of them wait. An error, at the line that waits.

Why it is bad
    The rank that fails in the log ("connection closed by peer") is the healthy one. The one that left early, because its data ran out or
    because it returned, says nothing.

Wrong
    if rank != 0:
        return                    # done with training
    dist.barrier()                # rank 0 waits for ranks that are gone

Right
    dist.barrier()
    if rank != 0:
        return

Known limits
    A rank that left by an exception is LAU101.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check
from harness.checks.hng import waits
from harness.checks.lau import blame
from harness.model import Finding, Severity, Where
from harness.record import Run


class DeadPeer(Check):
    code = "HNG106"
    name = "dead-peer"
    severity = Severity.ERROR
    substantial = False
    explains = ("HNG101", "HNG103", "HNG104", "LAU101", "LAU102", "LAU122", "LAU124")

    def end(self, run: Run) -> Iterable[Finding]:
        if not (found := waits.require_hang(run)):
            return
        workers = waits.workers(run)
        dead, standing = [w for w in workers if w.code], [w for w in workers if w.code is None]
        if dead and standing:
            where = next((w.where for w in standing if w.where is not None), None)
            yield self.finding(
                f"a worker process had ended with code {dead[0].code} while others wait for it",
                where=dead[0].where or where,
                ranks=[w.rank for w in found],
                notes=[waits.describe(found), *(f"a worker stands in {w.inner}() at line {w.where.line}" for w in standing[:3] if w.where)],
                help="find why that worker ended; let a barrier have a timeout, and the parent look at exit codes while it joins",
            )
            return
        gone = [w for w in found if w.op == "ended"]
        left = [w for w in found if w.peers]
        if not gone or not left:
            return
        first = left[0]
        yield self.finding(
            f"{blame.plural([w.rank for w in gone])} had ended while {waits.describe(left)}",
            where=_left_at(run, gone) or first.where,
            ranks=[w.rank for w in gone],
            notes=waits.notes(found),
            help="let every rank take part until the last collective: same number of steps, no early return before it",
        )


def _left_at(run: Run, gone: Sequence[waits.Wait]) -> Where | None:
    """The os._exit() by which one of them left; a rank that came to the end of its script has no such line."""
    calls = [e for w in gone if (r := run.ranks[w.rank]) is not None for e in r.of("exit_call") if e["how"] == "os._exit"]
    return next((e.where for e in calls if e.where is not None), None)
