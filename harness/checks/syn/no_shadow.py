"""SYN143 collective-without-shadow: a collective of the script's own inside Join, where a rank has run out of batches

What it does
    Where all ranks entered `with Join(...)`, looks for the first call at which a rank that has left its loop shadows the model's collectives
    while another rank issues one that is not the model's.

Why it is bad
    A rank without batches answers, call by call, what DDP and the other Joinables issue in a step, and nothing else. A collective of the
    script's own meets one of those: numbers are mixed, sizes do not fit, or the ranks that still have batches wait for ever.

Wrong
    with Join([model]):
        for x, y in loader:
            train_step(x, y)
            dist.all_reduce(metric)

Right
    with Join([model]):
        for x, y in loader:
            train_step(x, y)
            metric += ...                 # of this rank
    dist.all_reduce(metric)               # once, behind Join

Known limits
    Healthy while all ranks have batches: the call is told only where a rank ran out. A Joinable of the script's own answers from its
    hook, in the script's code, and is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.checks.base import Check, NotApplicable
from harness.checks.syn import pairing
from harness.model import Finding, Severity
from harness.record import Event, Run


class CollectiveWithoutShadow(Check):
    code = "SYN143"
    name = "collective-without-shadow"
    severity = Severity.ERROR
    explains = ("HNG*", "LAU101", "LAU102", "LAU124", "OUT101", "SYN121", "SYN122", "SYN123", "DAT111")

    def end(self, run: Run) -> Iterable[Finding]:
        entered = {(e.where.file, e.where.line) for _, e in run.events("join") if e.where is not None}
        if not entered or not all(r.of("join") for r in run.present):
            raise NotApplicable("Join is not in use")
        pairs = pairing.of(run)
        for n in range(pairs.shortest):
            shadows = [_stands(e, entered) for e in pairs.at(n)]
            if any(shadows) and not all(shadows) and (found := self._met(pairs, n, shadows)) is not None:
                yield found
                return

    def _met(self, pairs: pairing.Pairing, n: int, shadows: Sequence[bool]) -> Finding | None:
        events = pairs.at(n)
        shadow = events[shadows.index(True)]
        at = next((i for i, e in enumerate(events) if not shadows[i] and _own(e, shadow)), None)
        if at is None:
            return None
        gone = [r for r, s in zip(pairs.ranks, shadows, strict=True) if s]
        return self.finding(
            f"rank {', '.join(map(str, gone))} has run out of batches, and Join answers for it to the model's collectives only: {events[at]['op']} of "
            f"rank {pairs.ranks[at]} is not one of them",
            where=events[at].where,
            ranks=(pairs.ranks[at], *gone),
            notes=[f"it meets the {shadow['op']} that Join itself issues ({shadow.where.place if shadow.where else 'in Join'})", f"collective {n} of the run"],
            help="call it outside of Join, once behind the loop, or give Join a Joinable whose JoinHook answers it on a rank without batches",
        )


def _stands(event: Event, entered: set[tuple[str, int]]) -> bool:
    """Join issues it on leaving its block."""
    return event.where is not None and (event.where.file, event.where.line) in entered


def _own(event: Event, shadow: Event) -> bool:
    """The script itself calls it: it does not fit the shadow, or its line names the operation. The model's are called from the line of its forward."""
    if event.where is None or event["hook"] or event["inside"] or "notify_join_context" in event.where.text:
        return False  # a Joinable of the script's own asks who is left
    return (event["op"], event["numel"], event["dtype"]) != (shadow["op"], shadow["numel"], shadow["dtype"]) or f"{event['op']}(" in event.where.text
