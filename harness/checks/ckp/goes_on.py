"""Whether training goes on where a checkpoint says that it was left: what tells a resume from a warm start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.checks.ckp import files
from harness.checks.dat import passes
from harness.probe import protocol
from harness.record import Event, Recording, Run, number

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "acc_delta", "max_exp_avg_sq", "sum")


def counted_on(run: Run, recording: Recording, load: files.Load) -> str:
    """The stored number from which this training counts on; "" where it counts from 0, or where nothing shows it.

    Either the first epoch that a sampler is given after the load, or the same number in the next file of these entries: it has grown by just
    as many passes, or steps, as there were in between.
    """
    assert load.end is not None
    stored = {k: v for k, v in _whole_numbers(load.end).items() if v >= 0}
    first = next((number(e["epoch"], -1) for e in recording.of("set_epoch") if e.t_ns > load.end.t_ns), -1)
    epoch = next((k for k, v in stored.items() if first > 0 and first in (v, v + 1)), "")
    return epoch or next((k for key, value, since in _next_saves(run, load) if (k := _grown(recording, load, stored, key, value, since))), "")


def _grown(recording: Recording, load: files.Load, stored: Mapping[str, int], key: str, value: int, save: Event) -> str:
    before = stored.get(key, 0)
    if before < 1 or value <= before or load.end is None:
        return ""
    end_ns = load.end.t_ns
    num_passes = sum(end_ns < p.opened.t_ns < save.t_ns and p.trains for p in passes.of_recording(load.rank, recording))
    num_steps = number(save.step) - number(load.end.step)
    return key if value - before in {num_passes, num_steps} - {0} else ""


def _next_saves(run: Run, load: files.Load) -> Iterator[tuple[str, int, Event]]:
    """(entry, its number, event) of the first file with the same entries that is written after the load, whichever rank writes it."""
    saves = [s.begin for s in files.saves(run) if set(s.begin["groups"] or ()) == set(load.groups)]
    later = sorted((e for e in saves if e.t_ns > load.begin.t_ns), key=lambda e: e.t_ns)
    for save in later[:1]:
        yield from ((key, value, save) for key, value in _whole_numbers(save).items())


def _whole_numbers(event: Event) -> dict[str, int]:
    found = event["numbers"]
    return {str(k): v for k, v in found.items() if type(v) is int} if isinstance(found, Mapping) else {}


def optimizer_left_out(run: Run, load: files.Load) -> bool:
    """No optimizer's state is in this file, or in another one, and none was given to an optimizer from here on."""
    told = load.end["tensors"] if load.end is not None else None
    inside = any(str(name).rsplit("/", 1)[-1] in MOMENTS for name in told or ())
    others = any("optimizer" in one.groups.values() for one in files.loads(run))
    given = any(e.step >= number(load.begin.step) for r in run.present for e in r.of("load_optimizer"))
    return not (inside or others or given or "optimizer" in load.groups.values())


def begins_anew(recording: Recording, load: files.Load) -> Event | None:
    """The optimizer that first steps after the load, where it keeps moments, is a new one, and was made as the one before was: by the same
    statement, with the same rate."""
    step = number(load.begin.step)
    rows = recording.all_rows()
    old = {row.opt for row in rows if row.step < step}
    first = next((row for row in rows if row.step >= step and row.opt != protocol.OPT_BY_HAND), None)
    if first is None or first.opt in old:
        return None
    made = {number(e["opt"], -1): e for e in recording.of("params")}
    new = made.get(first.opt)
    if new is None or not keeps_moments(new):
        return None
    earlier = [made[o] for o in old if o in made]
    return new if not earlier or any(_alike(new, e) for e in earlier) else None


def keeps_moments(event: Event) -> bool:
    return str(event["kind"]) != "SGD" or any(isinstance(g, Mapping) and g.get("momentum") for g in event["groups"] or ())


def _alike(one: Event, other: Event) -> bool:
    rates = [[g.get("lr") for g in e["groups"] or () if isinstance(g, Mapping)] for e in (one, other)]
    return one.where == other.where and one["kind"] == other["kind"] and rates[0] == rates[1]
