"""DAT112 shuffle-restarts-after-resume: after a resume the samples come in an order that was used up before.

What it does
    Compares the order of training passes after a checkpoint was loaded with that of passes that were complete when it was saved, also
    over several generations of processes of one run. Besides: a pass that begins in the middle of an order which an earlier pass has
    drawn to its end; and (a warning) one that begins anew with the order of the pass that was given up for the save.

Why it is bad
    The epochs that follow the resume repeat the shuffles of the first ones: batches that the model has seen in this very order, while
    others never come. Schedules that hang on the epoch start over as well.

Wrong
    for epoch in range(epochs - done):
        sampler.set_epoch(epoch)

Right
    for epoch in range(done, epochs):
        sampler.set_epoch(epoch)

Known limits
    Of a resume from another run's checkpoint only a stored epoch above 0 against a sampler at epoch 0 is seen. A second training from
    fresh weights, or one that goes back to an earlier checkpoint on purpose, is healthy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes
from harness.checks.dat.passes import Pass
from harness.model import Finding, Severity, Where
from harness.record import Event, Recording, Run, number

MIN_SAMPLES = 8
EPOCH_KEYS = (
    "epoch",
    "epochs",
    "last_epoch",
    "start_epoch",
    "next_epoch",
    "epochs_done",
    "done_epochs",
    "completed_epochs",
    "num_epochs_done",
)
MAX_RANKS = 2  # all ranks resume alike
PROGRESS = re.compile(r"(\w*_)?(epoch|step|iter|iteration|round|batch|update|position|seen)s?(_\w+)?$", re.IGNORECASE)


class ShuffleRestarts(Check):
    code = "DAT112"
    name = "shuffle-restarts-after-resume"
    severity = Severity.ERROR
    explains = ("CKP113",)

    def end(self, run: Run) -> Iterable[Finding]:
        histories = [_history(run, rank) for rank in range(min(run.world_size, MAX_RANKS))]
        shuffled = [h for h in histories if any(p.shuffles for _, p in h)]
        if not shuffled:
            raise NotApplicable("no training pass over a shuffling sampler")
        resumed = any(r.of("load_optimizer") for r in _generations(run))
        for history in shuffled:
            found = (_replayed(history) if resumed else None) or _middle(history)
            if found is not None:
                yield self._found(run, *found)
                return
        for history in shuffled:
            interrupted = _interrupted(history)
            if interrupted is not None:
                yield self._from_its_start(run, *interrupted)
                return
            restarted = _restarted(history)
            if restarted is not None:
                yield self._restarted_at(run, *restarted)
                return

    def _restarted_at(self, run: Run, one: Pass, key: str, value: int) -> Finding:
        return self.finding(
            f"the checkpoint says {key} {value}, yet the sampler starts with epoch 0 again: the shuffles of the first epochs are repeated",
            where=_set_at(run, one) or one.where,
            ranks=run.rank_ids,
            notes=["model and optimizer state were loaded before this pass"],
            help="go on from the stored epoch: `for epoch in range(start, epochs): sampler.set_epoch(epoch)`",
        )

    def _from_its_start(self, run: Run, again: Pass, earlier: Pass) -> Finding:
        return self.finding(
            f"after the resume the interrupted epoch starts with its first batch again: {earlier.num_batches} batches that were trained on before the save "
            "are trained on twice",
            where=again.where,
            ranks=run.rank_ids,
            notes=[f"the first {min(len(again.indices), len(earlier.indices))} indices of rank {again.rank} are those of the pass before the save"],
            help="skip what the epoch has seen, `itertools.islice(loader, step % len(loader), None)`, or save at the ends of epochs",
            severity=Severity.WARNING,
        )

    def _found(self, run: Run, again: Pass, earlier: Pass, how: str) -> Finding:
        epochs = [(p.distributed or {}).get("epoch") for p in (again, earlier)]
        notes = [f"{min(len(again.indices), len(earlier.indices))} indices of rank {again.rank} are those of an earlier, complete pass"]
        if epochs[0] is not None:
            notes.append(f"the sampler's epoch is {epochs[0]}, as it was then")
        return self.finding(
            f"after the resume the samples come in an order that has been used before: {how}",
            where=_set_at(run, again) or again.where,
            ranks=run.rank_ids,
            notes=notes,
            help="store the epoch in the checkpoint and go on from it: `for epoch in range(done, epochs): sampler.set_epoch(epoch)`",
        )


def _generations(run: Run) -> list[Recording]:
    """All recordings of the training ranks, those of an earlier mp.spawn among them, in order of time."""
    return sorted(run.processes, key=lambda r: r.events[0].t_ns if r.events else 0)


def _rank_of(recording: Recording) -> int:
    joined = [e for e in recording.of("pg") if e["done"]]
    return number(joined[-1]["rank"], -1) if joined else recording.rank


def _history(run: Run, rank: int) -> list[tuple[Recording, Pass]]:
    return [
        (r, p)
        for r in _generations(run)
        if _rank_of(r) == rank
        for p in passes.of_recording(rank, r)
        if p.closed is not None and p.trains and len(p.indices) >= MIN_SAMPLES
    ]


def _replayed(history: list[tuple[Recording, Pass]]) -> tuple[Pass, Pass, str] | None:
    """The first pass after a load of optimizer state whose order equals that of a pass that was complete before the save."""
    for position, (recording, one) in enumerate(history):
        loaded = _loaded_before(recording, one)
        if loaded is None or not one.shuffles:
            continue
        saved = _saved_before(history, loaded)
        if saved is None:
            continue
        for _, earlier in history[:position]:
            if earlier.closed is not None and earlier.exhausted and earlier.closed.t_ns < saved and _starts_alike(one, earlier):
                return (
                    one,
                    earlier,
                    "the shuffles restart with the first epoch's" if _is_first(history, earlier) else "an epoch is repeated",
                )
    return None


def _interrupted(history: list[tuple[Recording, Pass]]) -> tuple[Pass, Pass] | None:
    """The first pass after a load that trains from the first batch on in the order of the pass before it, which was given up in the middle, and whose
    steps are in the file that was loaded: no step was taken between the two."""
    for (former, earlier), (recording, one) in pairwise(history):
        loaded = _loaded_before(recording, one) if former is recording else None
        if loaded is None or loaded.t_ns < earlier.opened.t_ns or earlier.exhausted or not one.shuffles or one.first_trained > 1:
            continue
        loads = [e for e in recording.of("load") if e["done"] and e["path"] and e.step == loaded.step]
        paths = {e["path"] for e in loads if any(PROGRESS.match(str(k)) for k in e["numbers"] or ())}  # else it may be another stage's start
        written = {number(e.step) for r, _ in history for kind, key in (("save", "path"), ("rename", "dst")) for e in r.of(kind) if e[key] in paths}
        if loaded.step in written and loaded.step > earlier.opened.step + 1 and one.opened.step == loaded.step and _starts_alike(one, earlier):
            return one, earlier
    return None


def _restarted(history: list[tuple[Recording, Pass]]) -> tuple[Pass, str, int] | None:
    """The first training pass of a process that resumed from a checkpoint of an earlier run, drawn with epoch 0 although that is behind."""
    recording, one = history[0]
    loads = [e for e in recording.of("load") if e["done"] and e.t_ns < one.opened.t_ns and isinstance(e["numbers"], Mapping)]
    if not loads or _loaded_before(recording, one) is None or one.distributed is None or one.distributed.get("epoch") != 0:
        return None
    for key, value in loads[-1]["numbers"].items():
        if str(key).lower() in EPOCH_KEYS and isinstance(value, int) and value > 0:
            return one, str(key), value
    return None


def _loaded_before(recording: Recording, one: Pass) -> Event | None:
    """The load of optimizer state with no training pass of this process between it and `one` that started the resumed epochs."""
    loads = [e for e in recording.of("load_optimizer") if e.t_ns < one.opened.t_ns]
    return loads[-1] if loads else None


def _saved_before(history: list[tuple[Recording, Pass]], loaded: Event) -> int | None:
    """When the state that was loaded had been taken: the first save (or state_dict) of the run after training had begun."""
    begun = history[0][1].opened.t_ns
    recordings = list({id(r): r for r, _ in history}.values())
    saves = [e.t_ns for r in recordings for kind in ("save", "state_dict") for e in r.of(kind) if begun < e.t_ns < loaded.t_ns]
    return max(saves) if saves else None


def _starts_alike(one: Pass, earlier: Pass) -> bool:
    num = min(len(one.indices), len(earlier.indices))
    return num >= MIN_SAMPLES and one.dataset_len == earlier.dataset_len and one.indices[:num] == earlier.indices[:num]


def _is_first(history: list[tuple[Recording, Pass]], earlier: Pass) -> bool:
    return earlier is history[0][1]


def _middle(history: list[tuple[Recording, Pass]]) -> tuple[Pass, Pass, str] | None:
    """A pass that is the tail of an order which an earlier pass has drawn to its end, while later orders have been drawn since."""
    for position, (_, one) in enumerate(history):
        for before, (_, earlier) in enumerate(history[: max(0, position - 1)]):
            tail = earlier.indices[-len(one.indices) :]
            newer = any(p.indices[:MIN_SAMPLES] != earlier.indices[:MIN_SAMPLES] for _, p in history[before + 1 : position])
            if earlier.exhausted and len(one.indices) < len(earlier.indices) and tail == one.indices and newer and one.key != earlier.key:
                return one, earlier, f"{len(one.indices)} samples of an epoch that was complete are trained on again"
    return None


def _set_at(run: Run, again: Pass) -> Where | None:
    """The set_epoch call before this pass, if it was made for this sampler."""
    sampler = (again.distributed or {}).get("id")
    calls = [e for r in _generations(run) for e in r.of("set_epoch") if e["sampler"] == sampler and e.t_ns < again.opened.t_ns]
    return calls[-1].where if calls else None
