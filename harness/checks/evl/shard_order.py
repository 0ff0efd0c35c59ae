"""EVL112 gathered-in-shard-order: predictions are gathered rank after rank and compared with labels in the order of the data set.

What it does
    For evaluations under a distributed sampler whose predicted classes are gathered from all ranks: computes the accuracy that each rank's
    predictions have with its own labels, and the one that the parts have with the labels in the order of the data set, put one behind the
    other or taken by turns. A finding where a reported number is one of these and not the first; where a row of scores for each sample is gathered, and
    its best column taken for the class, at every evaluation. So too where the source compares the best column of each gathered row with `arange(n)`,
    put one behind the other, against columns that were not gathered.

Why it is bad
    A DistributedSampler deals samples out by turns: rank 0 has 0, 2, 4, ... Put one behind the other, the ranks' parts are in another order
    than the data set; a sampler that shuffles (the default) has no order of the data set at all. Most predictions are compared with labels of
    other samples, and the accuracy looks like that of guessing.

Wrong
    dist.all_gather(parts, mine)
    accuracy = (torch.cat(parts)[: len(data)] == data.labels).float().mean()

Right
    predictions = torch.stack(parts, dim=1).flatten()[: len(data)]          # undo the turns; or gather labels as well as predictions

Known limits
    Needs whole numbers on the CPU, one a sample, or scores of at most 256 classes, whose best column counts, labels of the same type in the batches, and an
    accuracy in a printed or logged line. Silent where the labels are gathered too, and the accuracy of equal parts is reported.
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.checks.base import Check, NotApplicable
from harness.checks.dat import passes, together
from harness.checks.dat.passes import Pass
from harness.checks.evl import reports
from harness.checks.evl.reports import Value
from harness.model import Finding, Severity
from harness.record import Event, Run, number, where_of

MIN_APART = 0.02  # of the two accuracies
MIN_DIGITS, MIN_DIGITS_OF_SCORES = 2, 3


class GatheredInShardOrder(Check):
    code = "EVL112"
    name = "gathered-in-shard-order"
    severity = Severity.ERROR

    def end(self, run: Run) -> Iterable[Finding]:
        together.required(run)
        calls = _calls(run)
        if (found := self._numbered(run)) is not None:
            yield found
            return
        if not calls:
            raise NotApplicable("no predicted classes are gathered")
        for same in calls:
            found = self._of_site(run, same)
            if found is not None:
                yield found
                return

    def _of_site(self, run: Run, calls: list[list[Event]]) -> Finding | None:
        """At the first evaluation that shows it; of scores, whose columns may be something else than classes, all have to that can."""
        shown = None
        for call in calls:
            drawn = [p for rank, event in enumerate(call) if (p := _pass_before(run, rank, event)) is not None]
            apart = _apart(call, drawn) if len(drawn) == len(call) else []
            found = next((f for wrong in apart if (f := self._reported(run, call, drawn[0], *wrong)) is not None), None)
            found = found if found is not None and not self._compared_alike(run, call) else None
            if found is None and apart and call[0]["scored"]:
                return None
            shown = shown or found
        return shown

    def _reported(self, run: Run, call: list[Event], one: Pass, how: str, wrong: float, right: float) -> Finding | None:
        scores = bool(call[0]["scored"])
        for rank, event in enumerate(call):
            values = _told_after(run, rank, event)
            value = next((v for v in values if _is(v, wrong) and not _is(v, right)), None)
            if value is not None and not (scores and right < 1 and any(_is(v, right) for v in values)):
                return self._found(run, event, one, f"{how}, are compared with labels in the order of the data set: accuracy {wrong:.4f}", value, right)
        return None

    def _compared_alike(self, run: Run, call: list[Event]) -> bool:
        """Labels are gathered at the same evaluation, and what the predictions have with them, part by part, is reported; a number like the wrong
        accuracy is then another one (a threshold)."""
        owns = []
        for other in (c for calls in _calls(run) for c in calls if c[0].step == call[0].step):
            drawn = [p for rank, event in enumerate(other) if (p := _pass_before(run, rank, event)) is not None]
            owns += [_accuracies([_guesses(e) for e in other], drawn)[0]] if len(drawn) == len(other) else []
        if len(owns) < 2 or max(owns) < 1:
            return False
        owns.remove(max(owns))  # the labels
        return any(_is(v, own) for rank, event in enumerate(call) for v in _told_after(run, rank, event) for own in owns if own > 0)

    def _numbered(self, run: Run) -> Finding | None:
        """Rows of a retrieval: row i is compared with i."""
        firsts = [next((e for e in r.of("gathered") if e["numbered"]), None) for r in run.present]
        drawn = [None if e is None else _dealt_before(run, rank, e) for rank, e in enumerate(firsts)]
        event, one = firsts[0], drawn[0]
        if event is None or one is None or any(d is None for d in drawn):
            return None
        return self.finding(
            "the rows gathered from the ranks, put one behind the other, are taken for the samples 0, 1, 2, ... of the data set",
            where=where_of(event["numbered"]) or event.where,
            ranks=run.rank_ids,
            notes=[f"rank 0 has samples {', '.join(str(i) for i in one.indices[:4])}, ...: row 1 is sample {one.indices[1]}"],
            help="undo the turns (`torch.stack(parts, 1).flatten(0, 1)`), or gather what the rows are compared with as well",
            severity=Severity.WARNING,
        )

    def _found(self, run: Run, event: Event, one: Pass, what: str, value: Value, right: float) -> Finding:
        turned = "undo the turns (`torch.stack(parts, 1).flatten()`), or gather the labels as well and compare part by part"
        return self.finding(
            f"the ranks' predictions, {what}, each rank with its own labels {right:.4f}",
            where=(one.made_sampler if one.shuffles else where_of(event["joined"])) or event.where,
            ranks=run.rank_ids,
            notes=[f"reported: {value.value:g}", f"rank 0 has samples {', '.join(str(i) for i in one.indices[:4])}, ..."],
            help="`DistributedSampler(..., shuffle=False)` for a set that is measured, or gather the labels as well" if one.shuffles else turned,
            evidence={"reported": value.value, "own_labels": right},
        )


def _apart(call: list[Event], drawn: list[Pass]) -> list[tuple[str, float, float]]:
    """(how the parts are put together, accuracy then, with the own labels) of the orders that tell. Columns that are no classes agree with labels by chance."""
    guesses, scores = [_guesses(e) for e in call], bool(call[0]["scored"])
    right, others = _accuracies(guesses, drawn)
    least = max(MIN_APART, 2 / max(1, sum(map(len, guesses))) ** 0.5) if scores else MIN_APART
    return [(how, wrong, right) for how, wrong in others.items() if right > 0 and (right - wrong if scores else abs(right - wrong)) >= least]


def _told_after(run: Run, rank: int, event: Event) -> list[Value]:
    """Numbers that are reported at the same evaluation, in enough digits."""
    least = MIN_DIGITS_OF_SCORES if event["scored"] else MIN_DIGITS
    later = [r for r in reports.all_reports(run)[rank] if r.t_ns > event.t_ns and r.step == event.step]
    return [v for r in later for v in r.values() if v.digits >= least]


def _is(value: Value, accuracy: float) -> bool:
    return value.is_near(accuracy) or value.is_near(100 * accuracy)


def _calls(run: Run) -> list[list[list[Event]]]:
    """By statement: its n-th gather of classes or scores, on all ranks."""
    tables: dict[tuple[str, int], list[list[Event]]] = {}
    for recording in run.present:
        counts: dict[tuple[str, int], int] = {}
        for event in recording.of("gathered"):
            if (event["classes"] or event["scored"]) and event.where is not None:
                key = (event.where.file.rpartition("/")[-1], event.where.line)
                counts[key] = nth = counts.get(key, 0) + 1
                calls = tables.setdefault(key, [])
                calls += [[] for _ in range(nth - len(calls))]
                calls[nth - 1].append(event)
    whole = ([c for c in calls if len(c) == run.world_size] for calls in tables.values())
    return [calls for calls in whole if calls]


def _pass_before(run: Run, rank: int, event: Event) -> Pass | None:
    """The last pass before it, if it was a whole one of this step over a share, with a label a sample and as many as were gathered."""
    recording = run.ranks[rank]
    ended = [p for p in passes.of_recording(rank, recording) if p.closed is not None and p.closed.t_ns < event.t_ns] if recording is not None else []
    one = ended[-1] if ended else None
    if one is None or one.closed is None or not one.evaluates or not one.exhausted or one.closed.step != event.step:
        return None
    shared = number((one.distributed or {}).get("num_replicas")) == run.world_size
    return one if shared and len(one.labels) == len(one.indices) == len(_guesses(event)) else None


def _guesses(event: Event) -> tuple[int, ...]:
    return passes.unpack(event["classes"] or event["scored"])


def _dealt_before(run: Run, rank: int, event: Event) -> Pass | None:
    """The last pass before it, if a distributed sampler dealt its samples out by turns and as many rows were gathered."""
    recording = run.ranks[rank]
    ended = [p for p in passes.of_recording(rank, recording) if p.closed is not None and p.closed.t_ns < event.t_ns] if recording is not None else []
    one = ended[-1] if ended else None
    if one is None or one.closed is None or not one.evaluates or not one.exhausted or one.closed.step != event.step or len(one.indices) < 3:
        return None
    shared = number((one.distributed or {}).get("num_replicas")) == run.world_size
    rows = number(event["leaves"]) % len(one.indices) == 0
    return one if shared and rows and list(one.indices[:3]) != list(range(one.indices[0], one.indices[0] + 3)) else None


def _accuracies(classes: list[tuple[int, ...]], drawn: list[Pass]) -> tuple[float, dict[str, float]]:
    """With each rank's own labels, and with labels in the order of the data set by how the parts are put together; a repeated sample counts
    once."""
    labels: dict[int, int] = {}
    own: dict[int, bool] = {}
    for predicted, one in zip(classes, drawn, strict=True):
        for index, label, guess in zip(one.indices, one.labels, predicted, strict=False):
            labels.setdefault(index, label)
            own.setdefault(index, guess == label)
    num = len(labels)
    if not num or set(labels) != set(range(num)):
        return 0.0, {}
    orders = {
        "put one behind the other": [guess for predicted in classes for guess in predicted],
        "taken by turns": [guess for turn in zip(*classes, strict=False) for guess in turn],
    }
    return sum(own.values()) / num, {how: sum(labels[i] == g for i, g in enumerate(order[:num])) / num for how, order in orders.items()}
