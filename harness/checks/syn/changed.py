"""Parameters of a wrapped model that are no longer those that DDP saw in its constructor: what SYN104, SYN105 and SYN106 share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from harness.checks.base import Check
from harness.checks.syn import replicas
from harness.model import Finding, Severity
from harness.record import Run, texts


class ChangedAfterWrap(Check):
    """A change of one kind, that harmed: gradients of these parameters differ between ranks, or torch gave up waiting for them."""

    severity = Severity.ERROR
    explains = ("SYN127", "OPT111", "SYN126", "OPT114", "LAU101", "SYN110", "SYN111", "OPT101", "SYN114")
    were: ClassVar[dict[str, str]]  # `what` of the "wrap_changed" event -> what was done to them, for the message

    def end(self, run: Run) -> Iterable[Finding]:
        facts = replicas.require(run, ddp=True)
        parted = {n for p in facts.partings.values() for n in p.grad_names}
        for what, done in self.were.items():
            hits = replicas.changes(run, what)
            names = list(dict.fromkeys(n for _, e in hits for n in texts(e["names"])))  # of layers made one by one as well, in each rank's order
            if hits and (replicas.reduction_failed(run) or parted & set(names) or replicas.has_unnamed(parted, names)):
                yield self.finding(
                    f"{len(names)} parameters were {done}",
                    where=hits[0][1].where,
                    ranks=replicas.rank_list([r for r, _ in hits]),
                    notes=[replicas.listed(names), *replicas.failure_note(run)],
                    help="wrap the model after this change (construct DDP again), or make the change before wrapping",
                )
                return
