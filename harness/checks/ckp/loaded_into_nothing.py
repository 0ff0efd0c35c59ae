"""CKP116 loaded-into-nothing: a checkpoint of the trained model is read, and its weights come to stand nowhere.

What it does
    Looks at files whose tensors have the names and shapes of a model that takes its first step afterwards, and compares them with the
    model's weights at that step. A finding where not one of them is there, and no state was loaded into any model in between.

Why it is bad
    The training begins from random weights, and says nothing: only the loss is that of a start from scratch.

Wrong
    own = model.state_dict()
    own.update(torch.load(path))              # a dict of its own: the model does not see it

Right
    own = model.state_dict()
    own.update(torch.load(path))
    model.load_state_dict(own)

Known limits
    Only the first four loads of a statement are looked at, and models, with what is frozen in them, that have at least three tensors of the file, half
    of their own. An
    error where the script reads the model's state into a dict after the load, or restores the optimizer from the same file; else advice: it
    may want other things of the file (a mask, an anchor). Silent where weights are put in by other means, where several such files are read
    (an average), and, unless the optimizer is restored, where the model is made after the load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.checks import regime
from harness.checks.base import Check, NotApplicable
from harness.checks.ckp import files, keys
from harness.model import Finding, Severity
from harness.probe.protocol import clean_name
from harness.record import Event, Recording, Run

MIN_TENSORS = 3
Model = dict[str, tuple[object, object]]  # parameter -> (shape, digest before a first step)
FILLED = re.compile(r"^\w+\s*=\s*[\w.\[\]]+\.state_dict\(\)\s*(#.*)?$")


class LoadedIntoNothing(Check):
    code = "CKP116"
    name = "loaded-into-nothing"
    severity = Severity.ERROR
    explains = ("CKP107",)

    def end(self, run: Run) -> Iterable[Finding]:
        loads = [load for load in files.loads(run) if load.ok]
        if not loads:
            raise NotApplicable("nothing is loaded with torch.load")
        if regime.sharded(run):
            raise NotApplicable("parameters are sharded (DTensor)")
        found = {load.rank: lost for load in loads if (lost := _lost(run, load)) is not None}
        paths = {lost.load.path for lost in found.values()}
        if not found or len(paths) > 1 or any(load.rank not in found for load in loads if load.path in paths):
            return
        one = next(iter(found.values()))
        if not (one.untouched or one.resumed):
            return  # weights may have been put in by arithmetic: an average, a mask
        filled = one.read is not None and one.untouched
        certain = filled or one.resumed
        lead = _lead(one) if filled else ""
        yield self.finding(
            f"{files.name(one.load.path) or 'the file'} is read, but its weights come to stand in no model: {one.shared} of {one.total} tensors "
            "have its names and shapes",
            where=one.read.where if filled and one.read is not None else one.load.begin.where,
            ranks=sorted(found),
            notes=[
                "no load_state_dict between the load and the first step"
                + ("; the model's weights are what they were before" if one.untouched else "; not one of these tensors is the model's then"),
                *([f"the file's names begin with `{lead}`, the model's do not: `if key in own` drops every one"] if lead else []),
            ],
            help=f"take the prefix off before the names are compared: `key.removeprefix({lead!r})`"
            if filled and lead
            else "`state_dict()` gives a dict of its own: give the filled one to `model.load_state_dict(...)`"
            if filled
            else "give the weights to `model.load_state_dict(...)`",
            severity=None if certain else Severity.ADVICE,
        )


@dataclass(frozen=True)
class Lost:
    """A load whose weights a model that trained afterwards should have had."""

    load: files.Load
    shared: int  # tensors that the model has by name and shape
    total: int  # tensors of the model
    untouched: bool  # the model was there at the load, and its weights are the same at its first step
    read: Event | None  # the state_dict() that was to be filled
    resumed: bool  # an optimizer was given its state from the same file


def _lost(run: Run, load: files.Load) -> Lost | None:
    recording, end = run.ranks[load.rank], load.end
    if recording is None or end is None or not isinstance(end["digests"], list):
        return None
    names = [clean_name(str(n).rsplit("/", 1)[-1]) for n in end["tensors"] or ()]
    inside: dict[str, list[tuple[object, object]]] = {}  # a file may hold several models
    for name, shape, digest in zip(names, end["shapes"] or (), end["digests"], strict=False):
        inside.setdefault(name, []).append((shape, digest))
    here = end["here"] if isinstance(end["here"], dict) else {}
    for first, held, frozen in _first_steps(recording, end):
        model = held | frozen
        between = [e for e in recording.of("load_state") if end.t_ns < e.t_ns < first.t_ns]
        shared = [n for n, (shape, _) in model.items() if any(s == shape for s, _ in inside.get(n, ()))]
        if between or len(shared) < max(MIN_TENSORS, 0.5 * len(model)) or any(d == model[n][1] for n in shared for _, d in inside[n]):
            continue
        untouched = all(model[n][1] in (here.get(n) or ()) for n in shared)
        read = next((e for e in recording.of("state_dict") if end.t_ns < e.t_ns < first.t_ns and _to_be_filled(e)), None)
        trained = [n for n in shared if n in held]
        again = [e for e in recording.of("load_optimizer") if e["source"] == load.path and end.t_ns < e.t_ns < first.t_ns]
        resumed = bool(again) and len(trained) >= max(MIN_TENSORS, 0.5 * len(held))
        return Lost(load, len(shared), len(model), untouched, read, resumed)
    return None


def _lead(one: Lost) -> str:
    """What a wrapper put before all names of the file, and not before those of the model that was read out; "" where that is not so."""
    leads = {keys.lead(str(n).rsplit("/", 1)[-1]) for n in (one.load.end["tensors"] if one.load.end else None) or ()}
    lead = leads.pop() if len(leads) == 1 else ""
    return lead if one.read is not None and one.read["module"] not in ("DistributedDataParallel", "DataParallel", "OptimizedModule") else ""


def _to_be_filled(read: Event) -> bool:
    """`own = net.state_dict()`: not a copy that is kept, nor one that is saved."""
    return read.where is not None and FILLED.search(read.where.text) is not None


def _first_steps(recording: Recording, end: Event) -> Iterator[tuple[Event, Model, Model]]:
    """The first step of each optimizer that began after the load: what it holds, and what is frozen beside that."""
    for first in recording.of("initial"):
        params = recording.params_at(first["opt"], first.step) if isinstance(first["opt"], int) else None
        if params is None or first.t_ns <= end.t_ns:
            continue
        frozen = [e for e in recording.of("frozen_initial") if (e["opt"], e.step) == (first["opt"], first.step)]
        yield first, _table(params, first["each"]), {n: v for e in frozen for n, v in _table(e, e["each"]).items()}


def _table(told: Event, each: object) -> Model:
    names = [clean_name(str(n)) for n in told["names"] or ()]
    return dict(zip(names, zip(told["shapes"] or (), each if isinstance(each, list) else (), strict=False), strict=False))
