"""DAT110 sample-order-differs: index i is another sample on each rank.

What it does
    Under a sampler that shards by index, compares what the ranks' data sets hold: the order of their lists, the content drawn for an
    index, and the label drawn for a sample.

Why it is bad
    A sampler deals out numbers. If the lists behind them are in another order on each rank (a set of strings, a directory listing), the
    shares overlap and miss samples; if the classes are, ranks train on contradicting labels.

Wrong
    self.keys = list(set(names))

Right
    self.keys = sorted(set(names))

Known limits
    Content tells only where samples are not augmented (under a sampler that repeats each one and deals the copies out they are), and of padded
    batches where they are equally long; lists are seen if they are attributes of the dataset. Labels that change from epoch to epoch are compared
    within an epoch only, and count where most of them differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.dat.contents import Contents, contents_of
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity, Where
from harness.record import Run, number, where_of

UNORDERED = r"\bset\(|listdir|glob|scandir|\bhash\(|keys\(|=\s*\{|\(\{"  # what gives another order, or another value, in each process
HELP = "sort what comes out of a set, a dict of a set, or a directory listing before it is indexed"


class SampleOrderDiffers(Check):
    code = "DAT110"
    name = "sample-order-differs"
    severity = Severity.ERROR
    explains = ("DAT114",)

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        sharded = [p for p in passes.training(run) if not p.iterable and (p.distributed is not None or p.custom)]
        unlike = [g for g in passes.aligned(run, sharded)[:8] if len({p.dataset_len for p in g}) > 1]
        if unlike and (found := self._other_sets(run, unlike)) is not None:
            yield found
            return
        groups = [g for g in passes.aligned(run, sharded)[:8] if len({(p.dataset_len, repr((p.subset or {}).get("set"))) for p in g}) == 1]
        if not groups:
            raise NotApplicable("no training pass under a sampler that shards by index")
        first = groups[0][0]
        contents = _contents(groups, first)
        if contents.apart:
            return  # shares that were cut before the sampler: DAT104 knows whether it cuts them again
        lists = _lists(run, str(first.opened["dataset"]))
        sizes = (first.dataset_len, number((first.subset or {}).get("of")))
        ordered = next((each for each in lists if each.num in sizes or contents.differ), None) if not contents.agree else None
        message = _message(contents, ordered, first)
        if not message:
            return
        named = ordered or next(iter(lists), None)
        yield self.finding(
            message,
            where=(named.where if named else None) or first.dataset_line(UNORDERED),
            ranks=run.rank_ids,
            notes=[f"`{named.name}` is in another order on each rank"] if named is not None and not message.startswith("`") else [],
            help=HELP,
        )

    def _other_sets(self, run: Run, groups: list[list[Pass]]) -> Finding | None:
        """Sets of different length that share most of their samples, under a sampler that shares them out by index."""
        first = groups[0][0]
        contents = _contents(groups, first)
        if not contents.differ or contents.twice < 0.2 * contents.seen:
            return None  # shares that were cut before the loader was made have no sample in common
        sizes = ", ".join(str(p.dataset_len) for p in groups[0][:8])
        return self.finding(
            f"the training set is another one on each rank ({sizes} samples): {contents.differ} of {contents.compared} indices stand for another sample",
            where=first.dataset_line(UNORDERED),
            ranks=run.rank_ids,
            notes=[f"{contents.twice} of {contents.seen} samples are drawn by ranks under different indices"],
            help="let nothing that differs by process decide what belongs to the set: `hash()` of a string does, and the order of a set",
        )


class Ordered(NamedTuple):
    """A list of the dataset that holds the same elements in another order on each rank."""

    name: str
    where: Where | None  # the line that assigned it
    num: int


def _contents(groups: list[list[Pass]], first: Pass) -> Contents:
    return contents_of([p for g in groups for p in g[: passes.MAX_COMPARED] if p.key == first.key])


def _message(contents: Contents, ordered: Ordered | None, first: Pass) -> str:
    """What is wrong, the surest first; empty where nothing is."""
    if contents.differ and (contents.twice or first.opened["repeats"] is not True):  # copies of one sample are made to look different
        return f"the same index gives another sample on another rank: {contents.differ} of {contents.compared} indices compared"
    if contents.twice >= max(3, 0.02 * contents.seen) and not contents.agree:
        return f"ranks with different indices draw the same samples: {contents.twice} of {contents.seen}"
    if ordered is not None:
        return f"`{ordered.name}` of {first.opened['dataset']} holds the same {ordered.num} elements in another order on each rank"
    return f"the same sample has another label on another rank: {contents.relabelled} samples" if contents.relabelled else ""


def _lists(run: Run, kind: str) -> list[Ordered]:
    """Lists of this kind of dataset of which each rank has another order."""
    tables = [passes.attributes(recording, kind) for recording in run.present]
    found = []
    for name, entry in (tables[0] if tables else {}).items():
        entries = [t.get(name) for t in tables]
        if all(isinstance(e, list) and len(e) >= 3 for e in entries):
            ordered, bags, sizes = ({repr(e[i]) for e in entries if e} for i in range(3))
            if len(ordered) > 1 and len(bags) == 1 and len(sizes) == 1:
                found.append(Ordered(str(name), where_of(entry[3]) if len(entry) > 3 else None, number(entry[2])))
    return found
