"""The line of the training code behind a statement of a helper: a helper that writes weights, or hooks them, is right in itself."""

from __future__ import annotations

from harness.model import Where
from harness.record import Event, Run, where_of


def by_trainer(run: Run, event: Event) -> Where | None:
    """Of an event's `callers`, innermost first: the first in a function that wraps a model or differentiates a loss."""
    trainers = {(w.file, w.function) for kind in ("wrap", "loss") for _, e in run.events(kind) if (w := e.where) is not None}
    callers = [w for site in event["callers"] or () if (w := where_of(site)) is not None]
    return next((w for w in callers if (w.file, w.function) in trainers), None)
