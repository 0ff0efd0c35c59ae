"""CKP105 optimizer-state-by-position: the optimizer's state is put back onto other parameters than it came from.

What it does
    Follows the state tensors (momentum, Adam's moments) by their content from `optimizer.state_dict()` to `optimizer.load_state_dict()` and
    compares the names of the parameters at both ends. Shapes that do not fit are a finding by themselves.

Why it is bad
    An optimizer's state dict knows positions, not names. A model that defines its layers in another order, other parameter groups, or a
    frozen layer in between gives each parameter the moments of another one; where the shapes agree, without a word.

Wrong
    optimizer = Adam([*head.parameters(), *body.parameters()])   # saved as [*body, *head]
    optimizer.load_state_dict(state)

Right
    optimizer = Adam(model.named_parameters())                   # torch >= 2.6 keeps the names; or build the groups in the same order

Known limits
    Names are compared where the state was saved in the same run, or where the checkpoint holds `param_names`. For an older file only the
    shapes tell.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.model import Finding, Severity
from harness.record import Event, Recording, Run, texts


class OptimizerStateByPosition(Check):
    code = "CKP105"
    name = "optimizer-state-by-position"
    severity = Severity.ERROR
    explains = ("LAU101", "LAU122", "HNG*", "OPT114")

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [
            (rank, recording, e)
            for rank, recording in enumerate(run.ranks)
            if recording is not None
            for e in recording.of("load_optimizer")
        ]
        if not loads:
            raise NotApplicable("no optimizer's state is loaded")
        for rank, recording, event in loads:
            shapes = [str(n) for n in event["mismatched"] or []]
            moved = [] if shapes else _moved(run, recording, event)
            if shapes or moved:
                ranks = sorted({r for r, _, e in loads if e.where == event.where}) or [rank]
                yield self._finding(event, shapes, moved, ranks)
                return

    def _finding(self, event: Event, shapes: list[str], moved: list[tuple[str, str]], ranks: list[int]) -> Finding:
        if shapes:
            message = f"the optimizer's state does not fit its parameters: {len(shapes)} of {event['params']} have another shape"
            notes = [f"for example {', '.join(f'`{n}`' for n in shapes[:3])}"]
        else:
            message = f"{len(moved)} of {event['params']} parameters get the optimizer state of another parameter"
            notes = [f"`{to}` gets the state of `{came}`" for came, to in moved[:3]]
        return self.finding(
            message,
            where=event.where,
            ranks=ranks,
            notes=notes,
            help="give the optimizer its parameters in the order in which they were saved, or map the state by name",
            evidence={"moved": len(moved), "mismatched": len(shapes)},
        )


def _plain(names: list[str]) -> list[str]:
    """Without the class name that stands in front where several models live: `Net.body.weight`."""
    heads = {n.split(".", 1)[0].rstrip("'") for n in names if n}
    if len(heads) == 1 and all("." in n for n in names if n) and next(iter(heads))[:1].isupper():
        return [n.split(".", 1)[-1] for n in names]
    return names


def _moved(run: Run, recording: Recording, event: Event) -> list[tuple[str, str]]:
    """(name where the state came from, name where it went), for those that differ."""
    to = _plain(texts(event["names"]))
    given = texts(event["given_names"])
    if len(given) == len(to) and sorted(given) == sorted(to):
        return [(a, b) for a, b in zip(given, to, strict=True) if a != b]
    labelled = _labelled(texts(event["came"]), to)
    if labelled:
        return [(a, b) for a, b in labelled if a != b]
    origin = _origin(run, recording, event)
    if origin is None:
        return []
    came = _plain(texts(origin["names"]))
    if sorted(came) != sorted(to):
        return []
    marks = Counter(d for d in origin["digests"] or [] if d)
    by_mark = {d: name for d, name in zip(origin["digests"] or [], came, strict=False) if d and marks[d] == 1}
    return [(by_mark[d], name) for d, name in zip(event["digests"] or [], to, strict=False) if d in by_mark and by_mark[d] != name]


def _labelled(came: list[str], to: list[str]) -> list[tuple[str, str]]:
    """(name under which the file holds it, name of the parameter), where the file holds state by name: `moments/layer.weight/exp_avg`."""
    known = set(to)
    found = [(next((part for part in label.split("/") if part in known), ""), name) for label, name in zip(came, to, strict=False)]
    return found if found and all(a for a, _ in found) and sorted(a for a, _ in found) == sorted(to) else []


def _origin(run: Run, recording: Recording, event: Event) -> Event | None:
    """The state_dict() whose tensors these are: this rank's own first, else another's (rank 0 saves)."""
    mine = {d for d in event["digests"] or [] if d}
    for source in (recording, *(r for r in run.present if r is not recording)):
        for taken in reversed(source.of("optimizer_state")):
            if taken.t_ns <= event.t_ns and mine and len(mine & set(taken["digests"] or [])) > len(mine) / 2:
                return taken
    return None
