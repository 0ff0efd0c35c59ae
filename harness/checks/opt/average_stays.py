"""OPT142 average-stays-in: for an evaluation the trained weights are replaced by their average, and training goes on from the average

What it does
    Follows what the script writes into a trained model between two optimizer steps (`p.copy_(s)`, `torch._foreach_copy_`, `load_state_dict`): whether the
    source is a tensor that lives on and moves towards the weights step by step (an EMA), whether the model is evaluated then, and from which values
    the next step starts. A finding where it starts from the average after every evaluation, on all ranks. It is a warning where a copy of the trained
    weights was made before that the source reads nowhere but in a function that writes it back and that nobody calls; else advice: Switch-EMA assigns
    the average on purpose, and a script may decide between the two.

Why it is bad
    Each evaluation throws away what the optimizer has reached since the average last caught up with it, and the optimizer's state belongs to
    weights that are gone. The loss falls much slower, the more often one evaluates, and nothing looks wrong: all ranks agree.

Wrong
    ema.store(net.parameters())
    ema.copy_to(net.parameters())
    score = evaluate(net)

Right
    ema.store(net.parameters())
    ema.copy_to(net.parameters())
    score = evaluate(net)
    ema.restore(net.parameters())                     # or evaluate a copy: copy.deepcopy(net)

Known limits
    Needs two such evaluations, with three steps between them in which the average moves: one that is updated once an epoch looks like an outer loop's weights
    (Reptile, federated averaging, Lookahead), which are put in to be trained. `p.data = shadow` calls nothing that is watched, and copies
    that an installed package makes are not looked at; nor are sharded parameters and what is compiled. Where single ranks do it, OPT111 says so.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks import told
from harness.checks.base import Check
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, where_of

ENOUGH = 2


class AverageStaysIn(Check):
    code = "OPT142"
    name = "average-stays-in"
    severity = Severity.WARNING
    explains = ("OPT113",)

    def end(self, run: Run) -> Iterable[Finding]:
        if not told.of(run, "swapped_in") or any(e["moved"] for _, e in run.events("self_copy")):  # they are put back out of themselves: CKP109
            return
        by_rank = [_left_in(r) for r in run.present]
        for place, events in by_rank[0].items() if by_rank else ():
            if all(place in found for found in by_rank):
                everywhere = [e for found in by_rank for e in found[place]]
                yield self._found(run, events, sure=all(e["kept"] is not None and not e["used"] for e in everywhere))
                return

    def _found(self, run: Run, events: list[Event], sure: bool) -> Finding:
        event, kept = events[0], events[0]["kept"]
        within = where_of(event["within"]) or event.where
        return self.finding(
            "the trained weights are stored aside, replaced by their average for an evaluation and never put back: training goes on from the average"
            if sure
            else "the trained weights are replaced by their average for an evaluation, and training goes on from the average",
            where=within,
            ranks=run.rank_ids,
            notes=[
                f"after {len(events)} of {len(events)} evaluations that were followed the next step started from what was written",
                *([f"written at {event.where.place}: `{event.where.text}`"] if event.where is not None and event.where != within else []),
                *([f"`{kept}` holds the trained weights meanwhile"] if kept is not None else []),
            ],
            help=(
                f"put the trained weights back when the evaluation is over: copy `{kept}` into the parameters"
                if sure
                else "evaluate a copy of the model, or keep the trained weights and put them back; as it is where the average is assigned on purpose (Switch-EMA)"
            ),
            severity=None if sure else Severity.ADVICE,
        )


def _left_in(recording: Recording) -> dict[tuple[str, int], list[Event]]:
    """Statement -> its writes, where all of them put in an average for an evaluation, and it stayed."""
    found: dict[tuple[str, int], list[Event]] = {}
    for event in recording.of("swapped_in"):
        if (where := event.where) is not None:
            found.setdefault(_key(where), []).append(event)
    return {key: events for key, events in found.items() if len(events) >= ENOUGH and _is_left(events)}


def _is_left(events: list[Event]) -> bool:
    stayed = all(e["evaluated"] and e["stays"] and not e["returned"] for e in events)
    return stayed and all(e["same"] for e in events[1:]) and any(e["follows"] >= ENOUGH for e in events)


def _key(where: Where) -> tuple[str, int]:
    return where.file, where.line
