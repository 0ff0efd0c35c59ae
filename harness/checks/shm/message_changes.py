"""SHM108 message-changes-on-the-way: what is taken out of a queue is not what was put into it.

What it does
    Takes a digest of the tensors that a process puts on a multiprocessing queue (or sends through a pipe) and another where a process takes
    them out. A finding where content comes out that nobody put in, or more often than it was put in.

Why it is bad
    torch moves a tensor that is sent to another process into shared memory; nothing is copied. Whatever the sender writes into it after
    `put()` is what the receiver reads: it trains on data that is mixed from several messages, and sees the newest twice.

Wrong
    for n in range(rollouts):
        fill(buffer)
        queue.put(buffer)

Right
    for n in range(rollouts):
        fill(buffer)
        queue.put(buffer.clone())        # or wait for the receiver's word before writing into it again

Known limits
    The first 512 messages of a process, and tensors on the CPU. Messages that hold the live weights of a model are left out: actors may
    want them as they are now. A receiver that was always quicker than the sender has taken what was put, and is silent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Run


class MessageChanges(Check):
    code = "SHM108"
    name = "message-changes-on-the-way"
    severity = Severity.ERROR
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        put, got = _events(run, "message_put"), _events(run, "message_got")
        if not put or not got:
            raise NotApplicable("no tensors go from process to process through queues or pipes")
        until = min((e.t_ns for e in put if e["last"]), default=None)  # what was put later is not known
        for shape in sorted({int(e["shape"]) for e in put}):
            ours = [e for e in put if e["shape"] == shape]
            theirs = [e for e in got if e["shape"] == shape and (until is None or e.t_ns < until)]
            num = _unknown(ours, theirs) if len(theirs) <= len(ours) else 0
            if num:
                yield self._found(run, _lost(ours, theirs), len(theirs), num)
                return

    def _found(self, run: Run, lost: list[Event], num_got: int, num: int) -> Finding:
        return self.finding(
            f"{num} of {num_got} messages are not what was put in: the sender writes into the tensor after it has handed it over",
            where=next((e.where for e in lost if e.where), None),
            ranks=sorted({max(p.rank, 0) for p in run.processes if p.of("message_put")}),
            notes=["a queue of processes passes shared memory: the receiver reads what is in it by then"],
            help="put a copy (`tensor.clone()`), or write into it again only when the receiver has said that it is done",
            evidence={"changed": num, "messages": num_got},
        )


def _events(run: Run, kind: str) -> list[Event]:
    return [e for p in run.processes for e in p.of(kind)]


def _unknown(put: list[Event], got: list[Event]) -> int:
    """Messages taken out whose content nobody put in, or not that often."""
    return (Counter(e["digest"] for e in got) - Counter(e["digest"] for e in put)).total()


def _lost(put: list[Event], got: list[Event]) -> list[Event]:
    """What nobody took out as it was put in."""
    taken = {e["digest"] for e in got}
    return [e for e in put if e["digest"] not in taken] or put
