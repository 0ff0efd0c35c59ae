"""SYN146 zeros-reduced: a statement of the training loop reduces tensors that are zero on every rank, each time

What it does
    Looks at what the script all-reduces while it trains. A finding where everything that one statement reduces is zero on all ranks, at three steps
    and more, and it is more than a few numbers.

Why it is bad
    Zeros are what is left of a difference whose two sides are one memory: `.detach()` and `.to(device)` do not copy. The ranks exchange nothing, and
    train models of their own; no value that is printed says so.

Wrong
    anchor = [p.detach() for p in model.parameters()]                # the parameters themselves
    ...
    delta = anchor[i] - p
    dist.all_reduce(delta)                                           # zero

Right
    anchor = [p.detach().clone() for p in model.parameters()]

Known limits
    Tensors on the CPU, by samples of 48 elements. A statement that once reduced something else is silent, and so are calls before the first step and those
    of a benchmark, between which no step is taken.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity, Where
from harness.probe import protocol
from harness.record import Event, Recording, Run, number

MIN_ROUNDS, MIN_NUMEL = 3, 64
REDUCTIONS = ("all_reduce", "reduce", *protocol.REDUCE_SCATTER_INTO)


class ZerosReduced(Check):
    code = "SYN146"
    name = "zeros-reduced"
    severity = Severity.WARNING
    explains = ("SYN126", "SYN127", "SYN129", "SYN130", "SYN101")

    def end(self, run: Run) -> Iterable[Finding]:
        if run.world_size < 2 or not any(r.num_rows for r in run.present):
            raise NotApplicable("no training of several ranks")
        tables = [_of_statements(r) for r in run.present]
        if not any(tables):
            return
        for place, events in tables[0].items():
            columns = [t.get(place, []) for t in tables]
            if all(_is_nothing(c) for c in columns):
                yield self._found(run, events)
                return

    def _found(self, run: Run, events: list[Event]) -> Finding:
        rounds = {e.step for e in events}
        return self.finding(
            f"{len(events) // len(rounds)} tensors that are zero on every rank are reduced here, each of {len(rounds)} times: what the ranks should exchange is "
            "lost before",
            where=events[0].where,
            ranks=run.rank_ids,
            notes=[f"{sum(number(e['numel']) for e in events) // len(rounds)} numbers each time"],
            help="if they are differences, look whether both sides are one memory: `.detach()` and `.to(device)` do not copy, `.clone()` does",
        )


def _of_statements(recording: Recording) -> dict[tuple[str, int], list[Event]]:
    found: dict[tuple[str, int], list[Event]] = {}
    for event in recording.of("coll"):
        where: Where | None = event.where
        if event["op"] in REDUCTIONS and event.step and where is not None and not event["hook"]:
            found.setdefault((where.file, where.line), []).append(event)
    return found


def _is_nothing(events: list[Event]) -> bool:
    rounds = {e.step for e in events}
    each = sum(number(e["numel"]) for e in events) / max(1, len(rounds))
    return len(rounds) >= MIN_ROUNDS and each >= MIN_NUMEL and all(e["zero"] for e in events)
