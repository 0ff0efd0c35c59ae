"""DAT123 names-numbered-apart: the same word or label has another number on each rank

What it does
    Compares the indexes that the ranks' data sets encode their samples with: dicts that number strings from 0 on and are about as long as an embedding
    or an output layer of the model. A finding where ranks share strings and give three in ten of them different numbers.

Why it is bad
    Row 7 of the embedding is one word on rank 0 and another one on rank 1, and both pull at it: the average of their gradients is for neither. A
    file of these weights fits one rank's index at most.

Wrong
    vocabulary = Vocabulary(rows[rank::world_size])            # in the order in which the rank meets the words
    classes = {name: i for i, name in enumerate(set(labels))}  # the order of a set of strings is another one in each process

Right
    vocabulary = Vocabulary(rows)                              # of all rows, or broadcast from rank 0
    classes = {name: i for i, name in enumerate(sorted(set(labels)))}

Known limits
    Needs the index in reach of the data set of a DataLoader. Numbers that the source only compares, sorts or divides by, or finds the rank's own rows
    with, are healthy: a rank in a frequency list, a place in a cache. Silent where another index of the same names is equal on all ranks. File lists
    and the like, whose names the ranks do not share, are healthy.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import together
from harness.model import Finding, Severity
from harness.record import Event, Run, number

MIN_SHARED, MIN_APART = 4, 0.3


class NamesNumberedApart(Check):
    code = "DAT123"
    name = "names-numbered-apart"
    severity = Severity.WARNING

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        tables = [{(str(e["owner"]), str(e["name"])): e for e in r.of("name_index")} for r in run.present]
        common = set(tables[0]).intersection(*tables[1:])
        if not common:
            raise NotApplicable("no data set numbers words or labels by a dict")
        for key in sorted(common):
            events = [t[key] for t in tables]
            if _of_its_own(events):
                continue
            shared, apart = _compared([_numbers(e) for e in events])
            if shared >= MIN_SHARED and apart >= 2 and apart >= MIN_APART * shared and not _numbered_elsewhere(key, tables):
                yield self.finding(
                    f"`{key[0]}.{key[1]}` numbers the same names differently on the ranks: {apart} of {shared} that were compared",
                    where=events[0].where,
                    ranks=run.rank_ids,
                    notes=[f"it holds {', '.join(str(e['num']) for e in events[:8])} names (by rank), and a table of the model has a row for each"],
                    help="build it from all of the data in a fixed order (`sorted(...)`), or broadcast rank 0's to the others",
                )
                return


def _of_its_own(events: list[Event]) -> bool:
    """The script compares the numbers, or finds with them what lies in another place on each rank: no model is fed with them."""
    places = {number(e["places"]) for e in events}
    return all(e["stays"] is True for e in events) and (places == {0} or len(places) > 1)


def _numbers(event: Event) -> dict[int, int]:
    return {pair[0]: pair[1] for pair in event["some"] or () if isinstance(pair, list) and len(pair) == 2}


def _compared(tables: list[dict[int, int]]) -> tuple[int, int]:
    """(names that all ranks have, those of them whose numbers differ)."""
    shared = set(tables[0]).intersection(*tables[1:])
    return len(shared), sum(len({t[name] for t in tables}) > 1 for name in shared)


def _numbered_elsewhere(key: tuple[str, str], tables: list[dict[tuple[str, str], Event]]) -> bool:
    """Another index gives these names the same numbers on all ranks: that one encodes them, and this is an order of the rank's own."""
    names = set(_numbers(tables[0][key]))
    for other in set(tables[0]).intersection(*tables[1:]) - {key}:
        numbers = [_numbers(t[other]) for t in tables]
        if all(n == numbers[0] for n in numbers) and 2 * len(names & set(numbers[0])) >= len(names):
            return True
    return False
