"""DAT101 sampler-epoch-not-set: every epoch draws the samples in the same order.

What it does
    Compares the order of the sample indices of successive training passes over a loader with a shuffling sampler. Where there is one pass
    only: whether its batches come back, bit for bit and in the same order (`itertools.cycle(loader)`, a list that was made of it once).

Why it is bad
    `DistributedSampler` shuffles with seed + epoch. Without `set_epoch` the epoch stays 0: each rank sees the same samples in the same
    batches for ever, and never those of the other ranks. The loss still falls, a little slower and to a worse place.

Wrong
    for epoch in range(epochs):
        for x, y in loader: ...

Right
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader: ...                      # set_epoch(epoch) behind this loop comes too late: epoch 1 repeats epoch 0

Known limits
    Needs two training passes of at least eight samples. A pass that is one batch holds the same samples in any order, and is not judged.
    A sampler that does not shuffle is healthy and silent; a sampler of the script's own counts as shuffling if it has a `set_epoch` method
    and draws another order than 0, 1, 2, ... A warm-up pass before the first `set_epoch` is healthy: `set_epoch` is too late only if it
    comes after every pass, the last one too. Passes that train with another optimizer belong to another training (a teacher and its student,
    the folds of a cross-validation), which may begin alike.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat import passes, replayed
from harness.checks.dat.passes import Pass
from harness.checks.dat.replayed import Replay
from harness.model import Finding, Severity
from harness.record import Event, Run

MIN_SAMPLES = 8  # two random orders agree on so many positions once in 40,320 times or less


class EpochNotSet(Check):
    code = "DAT101"
    name = "sampler-epoch-not-set"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        replays = [r for r in replayed.found(run) if _shuffles(r.one)]
        if replays:
            yield self._replayed(replays)
            return
        shuffling = [p for p in passes.few(passes.training(run)) if _shuffles(p) and not (p.planned == 1 and p.exhausted)]
        if not shuffling:
            raise NotApplicable("no training pass over a shuffling sampler")
        long = passes.by_key([p for p in shuffling if len(p.indices) >= MIN_SAMPLES])
        groups = [g for loader in long for g in _by_training(run, loader) if len(g) > 1]
        if not groups:
            raise Inconclusive("needs two training passes over one loader")
        repeated = [g for g in groups if all(_same_order(g[0], p) for p in g[1:])]
        moving = {g[0].key for g in groups if g not in repeated}  # some rank does set the epoch: DAT103
        repeated = [g for g in repeated if g[0].key not in moving]
        if repeated:
            yield self._found(run, repeated)
            return
        late = [(g, at) for g in groups if (at := _set_afterwards(run, g)) is not None]
        if late and len(late) == len([g for g in groups if g[0].key == late[0][0][0].key]):
            yield self._late(late)

    def _replayed(self, replays: list[Replay]) -> Finding:
        first = replays[0]
        at = first.epoch_set.where if first.epoch_set is not None else None
        notes = [f"{first.again} steps on rank {first.one.rank} got, bit for bit, the batches of {first.period} steps before"]
        if at is not None:
            notes.append(f"set_epoch() at line {at.line} has no effect: the loader is not asked again")
        return self.finding(
            f"the {first.one.num_batches} batches of one pass are trained on again and again: the loader is never asked for another order",
            where=first.one.where,
            ranks=[r.one.rank for r in replays],
            notes=notes,
            help="iterate over the loader itself in every epoch, after `set_epoch`: itertools.cycle and lists keep the batches of the first pass",
            severity=self._severity_of(first),
        )

    def _severity_of(self, replay: Replay) -> Severity:
        """A list of batches may be meant, to keep small data in memory; under a set_epoch it is not."""
        if replay.epoch_set is not None or (replay.drawn_in_training and replay.one.distributed is not None):
            return Severity.ERROR
        return Severity.WARNING if replay.drawn_in_training else Severity.ADVICE

    def _late(self, late: list[tuple[list[Pass], Event]]) -> Finding:
        group, event = late[0]
        return self.finding(
            f"epochs 0 and 1 drew the same sample order: set_epoch({event['epoch']}) comes after the pass of its epoch",
            where=event.where,
            ranks=sorted({g[0].rank for g, _ in late}),
            notes=[f"{len(group)} passes on rank {group[0].rank}, each of them before the set_epoch that is meant for it"],
            help="call `sampler.set_epoch(epoch)` before the loop over the loader, not after it",
            severity=Severity.WARNING,
        )

    def _found(self, run: Run, repeated: list[list[Pass]]) -> Finding:
        group = repeated[0]
        ranks = sorted({p.rank for g in repeated for p in g if g[0].key == group[0].key})
        num = min(len(p.indices) for p in group)
        last = len(group) - 1
        epochs = "epochs 0 and 1" if last == 1 else f"epochs 0 to {last}"
        seeded = group[0].distributed is None and not group[0].opened["set_epoch"]
        constant = _constant(run, group[0])
        sampler = "a generator seeded anew" if seeded else "the sampler's epoch was never changed"
        if constant is not None and constant.where is not None:
            return self.finding(
                f"{epochs} drew the same sample order: set_epoch is called with {constant['epoch']} every time",
                where=constant.where,
                ranks=ranks,
                notes=[f"{num} of {num} positions identical in {len(group)} passes on rank {ranks[0]}"],
                help="give set_epoch the number of the epoch that begins: `sampler.set_epoch(epoch)`",
            )
        other = _on_another(run, group[0])
        notes = [f"{num} of {num} positions identical in {len(group)} passes on rank {ranks[0]}: {sampler}"]
        if other is not None and other.where is not None:
            notes.append(f"set_epoch() at line {other.where.line} is called on another sampler than the one that this loader draws from")
        return self.finding(
            f"{epochs} drew the same sample order",
            where=other.where if other is not None else group[0].where,
            ranks=ranks,
            notes=notes,
            help="seed the generator once, before the first epoch, or with seed + epoch"
            if seeded
            else "call `loader.batch_sampler.sampler.set_epoch(epoch)` before the loop: `loader.sampler` is another one, which knows no epoch"
            if group[0].distributed is not None and group[0].opened["sampler"] == "SequentialSampler"
            else "call `sampler.set_epoch(epoch)` before the loop over the loader",
        )


def _by_training(run: Run, group: list[Pass]) -> list[list[Pass]]:
    """The passes by the optimizers that were stepped in them."""
    recording = run.ranks[group[0].rank]
    found: dict[frozenset[int], list[Pass]] = {}
    times, opts = (recording.column("t_ns"), recording.column("opt")) if recording is not None else ([], [])
    for one in group:
        begin, end = bisect_left(times, one.opened.t_ns), bisect_right(times, one.closed.t_ns) if one.closed is not None else len(times)
        found.setdefault(frozenset(opts[begin:end]), []).append(one)
    return list(found.values())


def _constant(run: Run, one: Pass) -> Event | None:
    """The last set_epoch of this pass's sampler, where it was called several times and always with the same."""
    recording, sampler = run.ranks[one.rank], (one.distributed or {}).get("id")
    given = [e for e in recording.of("set_epoch") if e["sampler"] == sampler] if recording is not None and sampler else []
    return given[-1] if len(given) > 1 and len({repr(e["epoch"]) for e in given}) == 1 else None


def _on_another(run: Run, one: Pass) -> Event | None:
    """A set_epoch with changing epochs, where none is for a sampler that any loader of the rank draws from."""
    recording = run.ranks[one.rank]
    if recording is None:
        return None
    drawn_from = {d.get("id") for e in recording.of("loader") if isinstance(d := e["distributed"], dict)}
    given = list(recording.of("set_epoch"))
    lost = given and len({repr(e["epoch"]) for e in given}) > 1 and not any(e["sampler"] in drawn_from for e in given)
    return given[0] if lost and drawn_from else None


def _set_afterwards(run: Run, group: list[Pass]) -> Event | None:
    """The first set_epoch, if none came before the first pass, one after the last, and the first two passes drew alike."""
    recording, sampler = run.ranks[group[0].rank], (group[0].distributed or {}).get("id")
    given = [e for e in recording.of("set_epoch") if e["sampler"] == sampler] if recording is not None and sampler else []
    if not given or given[0].t_ns < group[0].opened.t_ns or given[-1].t_ns < group[-1].opened.t_ns:
        return None
    between = [e for e in given if e.t_ns < group[1].opened.t_ns]
    if not between or not group[0].exhausted or not _same_order(group[0], group[1]):
        return None
    return between[-1]


def _shuffles(one: Pass) -> bool:
    if one.shuffles:
        return True
    return bool(one.opened["set_epoch"]) and one.custom and one.distributed is None and list(one.indices) != sorted(one.indices)


def _same_order(first: Pass, other: Pass) -> bool:
    num = min(len(first.indices), len(other.indices))
    return num >= MIN_SAMPLES and first.indices[:num] == other.indices[:num] and len(set(first.indices[:num])) > 1
