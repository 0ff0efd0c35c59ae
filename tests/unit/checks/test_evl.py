"""The evaluation checks on runs made by hand: each fires on its fault, is silent on a healthy twin, and survives torn recordings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import builder
import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.base import Check, Inconclusive
from harness.checks.engine import judge
from harness.checks.evl import zipped_parts
from harness.checks.evl.batch_means import MeanOfBatchMeans
from harness.checks.evl.best_of_one_shard import BestOfOneShard
from harness.checks.evl.blank_average import BlankAverage
from harness.checks.evl.by_own_count import SumByOwnCount
from harness.checks.evl.chosen_apart import ChosenByEachShard
from harness.checks.evl.dropout_stays_on import DropoutStaysOn
from harness.checks.evl.dropped import EvalDropsSamples
from harness.checks.evl.everywhere import EvalOnAllRanks
from harness.checks.evl.frozen_norm_moves import FrozenNormMoves
from harness.checks.evl.local_decision import RankLocalDecision
from harness.checks.evl.mean_of_metrics import MeanOfMetrics
from harness.checks.evl.never_evals import NeverEvals
from harness.checks.evl.one_shard import MetricFromOneShard
from harness.checks.evl.own_candidates import CandidatesOfOneShard
from harness.checks.evl.padded_gather import GatheredPaddingCounted
from harness.checks.evl.padding import EvalPaddingDuplicates
from harness.checks.evl.reduced_again import TotalsReducedAgain
from harness.checks.evl.reports import Report, Value
from harness.checks.evl.shard_order import GatheredInShardOrder
from harness.checks.evl.stays_in_eval import StaysInEval
from harness.checks.evl.sum_not_divided import MetricSumNotDivided
from harness.checks.evl.totals_kept import TotalsKept
from harness.checks.evl.unequal_means import MeanOfUnequalMeans
from harness.model import Finding, OutcomeKind, Severity
from harness.probe.datasets import pack
from harness.record import Event, Recording, Run

ALL: list[type[Check]] = [
    BestOfOneShard, CandidatesOfOneShard, EvalDropsSamples, EvalOnAllRanks, EvalPaddingDuplicates, GatheredInShardOrder, MeanOfMetrics, MeanOfUnequalMeans, MetricFromOneShard, MetricSumNotDivided, NeverEvals, RankLocalDecision,
    StaysInEval, SumByOwnCount, TotalsKept, TotalsReducedAgain,
]  # fmt: skip


def ddp(world: int = 2) -> Event:
    return event("wrap", index=0, group_size=world)


def one_pass(
    loop: int, *, line: int, closed: bool = True, opened: dict[str, Any] | None = None, s: int = 0, y: int = 0, **ended: Any
) -> list[Event]:
    first = {
        "loop": loop, "made": site(20, "loader = ..."), "sampler": "SequentialSampler", "dataset": "Data", "dataset_len": 20,
        "num_workers": 0,
        "batch_size": 5, "planned": 2,
    } | (opened or {})  # fmt: skip
    last = {
        "loop": loop,
        "num_batches": 2,
        "num_samples": 10,
        "content": 7,
        "order": 7,
        "steps": 0,
        "backwards": 0,
        "collectives": 0,
        "complete": True,
    } | ended
    begin = event("loader", line=line, s=s - last["steps"], y=y, **first)
    return [begin, event("pass", line=line, s=s, y=y, **last)] if closed else [begin]


def trained(loop: int, s: int, *, y: int = 0, closed: bool = True, **ended: Any) -> list[Event]:
    return one_pass(loop, line=30, s=s, y=y, closed=closed, **({"backwards": 2, "steps": 2, "grad": True, "training": True} | ended))


def sampler(rank: int, *, total: int = 20, size: int = 20, drop_last: bool = False) -> dict[str, Any]:
    told = {
        "num_replicas": 2,
        "rank": rank,
        "shuffle": False,
        "drop_last": drop_last,
        "total_size": total,
        "num_samples": total // 2,
        "dataset_len": size,
    }
    return {"sampler": "DistributedSampler", "distributed": told, "dataset_len": size}


def measured(loop: int, s: int, *, rank: int = 0, y: int = 5, opened: dict[str, Any] | None = None, **ended: Any) -> list[Event]:
    return one_pass(loop, line=50, s=s, y=y, opened=sampler(rank) | (opened or {}), **({"grad": False, "training": False} | ended))


def says(text: str, *, s: int, y: int = 5, line: int = 60) -> Event:
    return event("print", line=line, s=s, y=y, text=text)


def losses(*values: float) -> list[bytes]:
    return [row(i, loss=v) for i, v in enumerate(values)]


def two(*events: list[Event], rows: tuple[list[bytes], list[bytes]] = ([], []), **how: Any) -> Run:
    return builder.run([recording([ddp(), *own], rows[rank], rank=rank) for rank, own in enumerate(events)], **how)


def said(check: type[Check], run: Run) -> Finding:
    found = builder.findings(check, run)
    assert len(found) == 1 and found[0].code == check.code
    return found[0]


def silent(check: type[Check], run: Run) -> None:
    assert builder.findings(check, run) == []


def reduced(before: list[float], after: list[float], *, s: int, line: int = 55, kind: str = "sum", told: str = "reduced") -> Event:
    one = event(told, line=line, s=s, y=6, op="all_reduce", reduce=kind, before=before, after=after, at=s, at_y=6)
    one.data["at_t"] = one.t_ns  # type: ignore[index]
    return one


def healthy() -> Run:
    own = []
    for rank in range(2):
        events = trained(0, 2) + measured(1, 2, rank=rank)
        events.append(event("coll", line=55, s=2, y=5, op="all_reduce", numel=2))
        events.append(reduced([4.0 + rank, 10.0], [9.0, 20.0], s=2))
        own.append(events + ([says("epoch 0: accuracy 0.4500", s=2, y=6)] if rank == 0 else []))
    return two(*own, rows=(losses(0.5, 0.4), losses(0.6, 0.3)))


@pytest.mark.parametrize("check", ALL)
def test_silent_on_a_healthy_run(check: type[Check]) -> None:
    silent(check, healthy())


@pytest.mark.parametrize("check", ALL)
def test_nothing_recorded_is_no_crash(check: type[Check]) -> None:
    silent(check, builder.run([]))
    silent(check, builder.run([Recording("0-1-1"), Recording("0-2-1")], nproc=2))
    silent(check, builder.run([recording([ddp()], [row(0)[:100]], rank=0)], nproc=2))


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("value", [None, "x", -1, [], {}, [None], 1e400])
def test_forged_fields_are_no_crash(check: type[Check], value: Any) -> None:
    names = (
        "distributed",
        "switch",
        "planned",
        "num_samples",
        "content",
        "before",
        "after",
        "at",
        "at_t",
        "text",
        "exits",
        "ranges",
        "first_t",
        "rows",
        "y",
    )
    forged = dict.fromkeys(names, value)
    kinds = ("loader", "pass", "reduced", "print", "loop", "evaluated", "layers", "step_mode", "scalar", "coll", "open", "stall")
    events = [event(k, line=9, **(forged | {"loop": n, "of": "loader"})) for n in range(2) for k in kinds]
    builder.findings(check, two(trained(5, 2) + events, trained(5, 2) + events, rows=(losses(1, 2), losses(1, 3)), exits=(1, -9)))


def test_padding_counted() -> None:
    def run(op: str, numel: int, **sizes: Any) -> Run:
        own = []
        for rank in range(2):
            events = trained(0, 2) + measured(1, 2, rank=rank, opened=sampler(rank, **sizes))
            own.append([*events, event("coll", line=55, s=2, y=5, op=op, numel=numel)])
        return two(*own)

    found = said(EvalPaddingDuplicates, run("all_reduce", 2, size=19))
    assert "counts 20 samples, the data set has 19" in found.message
    said(EvalPaddingDuplicates, run("all_gather", 2, size=19))
    silent(EvalPaddingDuplicates, run("all_reduce", 2))
    silent(EvalPaddingDuplicates, run("all_reduce", 2, size=21, drop_last=True))
    with pytest.raises(Inconclusive):
        list(EvalPaddingDuplicates().end(run("all_gather", 10, size=19)))  # predictions, which may be cut to the length


@pytest.mark.parametrize(("count", "fires"), [(9.0, False), (10.0, True), (3.0, True)])  # of rank 1, beside 10 on rank 0
def test_padding_that_weighs_nothing(count: float, fires: bool) -> None:
    own = []
    for rank in range(2):
        events = trained(0, 2) + measured(1, 2, rank=rank, opened=sampler(rank, size=19))
        counted = [event("coll", line=55, s=2, y=5, op="all_reduce", numel=2), reduced([4.0, (10.0, count)[rank]], [8.0, 10.0 + count], s=2)]
        own.append([*events, *counted])
    assert bool(builder.findings(EvalPaddingDuplicates, two(*own))) == fires


def one_shard(text: str, *, y: int = 5, everywhere: bool = False) -> Run:
    own = []
    for rank in range(2):
        events = trained(0, 2) + measured(1, 2, rank=rank)
        own.append(events + ([says(text, s=2, y=y)] if rank == 0 or everywhere else []))
    return two(*own, rows=(losses(0.5, 0.4), losses(0.6, 0.3)))


def test_one_shard() -> None:
    found = said(MetricFromOneShard, one_shard("epoch 0: accuracy 0.4512"))
    assert found.severity is Severity.WARNING and found.ranks == (0,) and found.where is not None and found.where.line == 50


@pytest.mark.parametrize(
    "text",
    ["[rank 0] accuracy 0.4512", "local accuracy 0.4512", "evaluated in 3.21 s", "accuracy: 45 of 100", "train loss 0.4000", "lr 0.0100"],
)
def test_lines_that_do_not_speak_for_all(text: str) -> None:
    silent(MetricFromOneShard, one_shard(text))


def test_synchronised_before_the_report() -> None:
    silent(MetricFromOneShard, one_shard("accuracy 0.4512", y=6))
    silent(MetricFromOneShard, one_shard("accuracy 0.4512", everywhere=True))


@pytest.mark.parametrize("sites, y, line", [((55,), 6, 61), ((55, 56), 7, None), ((), 6, None), ((55,), 7, None)])
def test_one_entry_of_what_was_gathered(sites: tuple[int, ...], y: int, line: int | None) -> None:
    """The gather at line 55 is used by its first entry alone; the one at 56, and what is no call of the script's, by all."""

    def rank(r: int) -> list[Event]:
        events = [*trained(0, 2), *measured(1, 2, rank=r), event("one_entry", line=55, op="all_gather_object", used=site(61))]
        events += [event("coll", line=at, s=2, y=5, op="all_gather_object", numel=-1) for at in sites]
        return [*events, says("accuracy 0.4512", s=2, y=y)] if r == 0 else events

    own = [rank(0), rank(1)]
    found = builder.findings(MetricFromOneShard, two(*own, rows=(losses(0.5, 0.4), losses(0.6, 0.3))))
    assert [f.where and f.where.line for f in found] == ([line] if line else [])


def test_measured_on_rank_0_alone() -> None:
    events = trained(0, 2) + measured(1, 2, opened={"distributed": None})
    silent(MetricFromOneShard, two([*events, says("accuracy 0.4512", s=2)], trained(0, 2)))


def test_own_training_loss_in_a_table() -> None:
    def run(*, table: bool) -> Run:
        events = trained(0, 2)
        told = [says("epoch 0: train loss 0.4500", s=2), *([event("open", line=61, s=2, path="/r/metrics.csv", mode="a")] if table else [])]
        return two([*events, *told], trained(0, 2), rows=(losses(0.5, 0.4), losses(0.7, 0.6)))

    assert "metrics.csv" in said(MetricFromOneShard, run(table=True)).message
    silent(MetricFromOneShard, run(table=False))


def epochs_in_a_table(*shown: float, samples: tuple[int, int] = (8, 2)) -> Run:
    """Epochs of two steps, the last batch smaller; the ranks' losses are 0.5 and 0.3, 0.7 and 0.2, a little lower with each epoch."""
    first = [(0.5, 0.3), (0.7, 0.2)]
    own: list[list[Event]] = [[], []]
    rows: tuple[list[bytes], list[bytes]] = ([], [])
    for epoch, value in enumerate(shown):
        for rank in range(2):
            own[rank] += trained(epoch, 2 * epoch + 2)
            rows[rank].extend(row(2 * epoch + i, loss=v - 0.01 * epoch, num_samples=samples[i]) for i, v in enumerate(first[rank]))
        own[0] += [says(f"epoch {epoch}: train_loss {value:.4f}", s=2 * epoch + 2)]
        own[0] += [event("open", line=61, s=2 * epoch + 2, path="/r/history.json", mode="w")]
    return two(*own, rows=rows)


@pytest.mark.parametrize(
    ("shown", "fires"),
    [
        ((0.46, 0.45, 0.44, 0.43), True),  # own, by sample
        ((0.40, 0.39, 0.38, 0.37), True),  # by step
        ((0.40, 0.4521, 0.4435, 0.4312), False),  # once, by chance
        ((0.53, 0.52, 0.51, 0.50), False),  # by sample, over all
        ((0.46, 0.45, 0.44, 0.43, 0.4321), True),
    ],
)
def test_own_training_loss_in_nearly_all_epochs(shown: tuple[float, ...], fires: bool) -> None:
    assert bool(builder.findings(MetricFromOneShard, epochs_in_a_table(*shown))) == fires


def evaluations_of(*lines: str, reduced_too: bool = False) -> Run:
    """Hand-made evaluations one after another, losses of 0.6 and 0.9 in the mean and 0.01 less each time; the median is read once."""
    ranks: list[list[Event]] = [[], []]
    for nth, text in enumerate(lines):
        s = 2 * nth + 2
        for rank in range(2):
            mean, own = (0.6 - 0.01 * nth, 0.9 - 0.01 * nth)[rank], ranks[rank]
            own += trained(nth, s)
            read = {"num": 2, "rows": 100, "mean": mean, "weighted": mean, "total": 100 * mean, "sum": 2 * mean, "targets": 7 + rank, "of": "loss"}
            once = mean + 0.0123 - 0.001 * rank
            median = {"num": 1, "rows": 1, "mean": once, "weighted": once, "total": once, "sum": once, "of": "item"}
            for line, told in ((40, read), (41, median)):
                one = event("measured", line=line, s=s, at=s, at_y=4, **told)
                one.data.update(first_t=one.t_ns - 10, last_t=one.t_ns)  # type: ignore[attr-defined]
                own.append(one)
            if reduced_too:
                own.append(reduced([100.0, 80.0 + rank], [200.0, 161.0], s=s))
        ranks[0].append(says(text, s=s, y=9))
    return two(*ranks)


@pytest.mark.parametrize(
    ("texts", "fires"),
    [
        (["val_loss 0.6000", "val_loss 0.5900", "val_loss 0.5800"], True),
        (["val_loss 0.6000", "val_loss 0.7123", "val_loss 0.7011"], False),  # once, by chance
        (["val_loss 0.6000", "val_loss 0.6000"], True),  # the first is still the lowest, or the highest
        (["Test: loss: 0.6123 (0.7500)", "Test: loss: 0.6023 (0.7400)"], False),  # the median, and what was synchronised
        (["Test: loss: 0.6123 (0.6000)", "Test: loss: 0.6023 (0.5900)"], True),
        (["Test: loss 0.7500 acc 0.6123", "Test: loss 0.7400 acc 0.6023"], True),  # another metric's mean over all
        (["Test: acc: 0.6123 avg 0.8050"], False),  # as it was summed up and divided by the count
        (["Test: acc: 0.6123 avg 0.8000"], True),  # the rank's own quotient
    ],
)
def test_a_number_is_judged_by_all_lines_and_by_what_stands_beside_it(texts: list[str], fires: bool) -> None:
    assert bool(builder.findings(MetricFromOneShard, evaluations_of(*texts, reduced_too=True))) == fires


def own_means(text: str, *, kind: str = "loss", same: bool = False) -> Run:
    """Something else is reduced (y moves on) between a hand-made evaluation and its report."""
    ranks = []
    for rank in range(2):
        mean, rows = (0.6569, 0.9918)[rank], 100
        read = {"of": kind, "num": 2, "rows": rows, "mean": mean, "weighted": mean, "total": mean * rows, "sum": 2 * mean}
        targets = 7 if same else 7 + rank
        beside = {**read, "of": "loss", "targets": targets} if kind == "item" else {}
        told = [event("measured", line=40, s=2, targets=targets, at=2, at_y=4, first_t=5, last_t=6, **read)]
        told += [event("measured", line=41, s=2, at=2, at_y=4, first_t=5, last_t=6, **beside)] if beside else []
        ranks.append(trained(0, 2) + told + ([says(text, s=2, y=9)] if rank == 0 else []))
    return two(*ranks, rows=(losses(0.5, 0.4), losses(0.6, 0.3)))


def test_own_mean_reported_although_something_else_was_reduced() -> None:
    found = said(MetricFromOneShard, own_means("epoch 0: val_loss 0.6569"))
    assert found.where is not None and found.where.line == 60 and "0.82435" in found.notes[1]
    assert "100 of 200" in said(MetricFromOneShard, own_means("accuracy 65.69", kind="item")).message


@pytest.mark.parametrize("text", ["val_loss 0.8244", "val_loss 0.7001", "[rank 0] val_loss 0.6569"])
def test_means_of_all_ranks_are_healthy(text: str) -> None:
    silent(MetricFromOneShard, own_means(text))
    silent(MetricFromOneShard, own_means("val_loss 0.6569", same=True))


def hand_made(inputs: tuple[int, int], *, told: str = "accuracy 0.4512") -> Run:
    own = []
    for rank in range(2):
        events = trained(0, 2)
        one = event(
            "evaluated", line=50, s=2, y=5, num_forwards=2, rows=10, inputs=inputs[rank], first_y=5, last_y=5, grad=False, looped=False
        )
        one.data.update(first_t=one.t_ns - 10, last_t=one.t_ns)  # type: ignore[attr-defined]
        own.append([*events, one, *([says(told, s=2)] if rank == 0 else [])])
    return two(*own)


def test_loops_without_a_loader() -> None:
    said(MetricFromOneShard, hand_made((3, 4)))
    silent(MetricFromOneShard, hand_made((3, 3)))
    assert said(EvalOnAllRanks, hand_made((3, 3))).severity is Severity.ADVICE
    silent(EvalOnAllRanks, hand_made((3, 4)))


def test_every_rank_computes_the_statistics_of_batchnorm_anew() -> None:
    def whole(training: bool) -> Run:
        drawn = [measured(1, 2, rank=0, opened={"distributed": None}, indices=pack(list(range(20))), num_samples=20, training=training) for _ in range(2)]
        return two(*([*trained(0, 2), *own] for own in drawn))

    said(EvalOnAllRanks, whole(training=False))
    parts = [measured(1, 2, rank=0, opened={"distributed": None}, indices=pack(list(range(20))), rows=pack([7, 7, *range(100 * r, 100 * r + 18)]), num_samples=20) for r in range(2)]
    silent(EvalOnAllRanks, two(*([*trained(0, 2), *own] for own in parts)))  # each rank numbers its own part from 0 on
    silent(EvalOnAllRanks, whole(training=True))


def loop_event(level: int) -> Event:
    ranges = [
        {"file": "/home/u/train.py", "func": "main", "first": 30, "last": 34, "level": 0},
        {"file": "/home/u/train.py", "func": "main", "first": 28, "last": 70, "level": 1},
    ]
    return event(
        "loop", line=30, of="loader", ranges=ranges, exits=[{"site": site(66, "if bad > patience: break"), "kind": "break", "level": level}]
    )


def stopped(*, waits_at: int = 80) -> Run:
    """Rank 1 leaves after one epoch; rank 0 is in its second."""
    left = [loop_event(1), *trained(0, 2), event("coll", line=waits_at, s=2, op="barrier", numel=-1)]
    stayed = [loop_event(1), *trained(0, 2), *trained(1, 4, closed=False)]
    rows = [row(i, num_batches=1, t_ns=10**9) for i in range(2)]
    return two(stayed, left, rows=(rows, rows), exits=(-9, -9), reason="hang")


def test_decided_alone() -> None:
    found = said(RankLocalDecision, stopped())
    assert found.ranks == (1,) and found.where is not None and found.where.line == 66 and "epoch loop" in found.message
    silent(RankLocalDecision, stopped(waits_at=60))  # inside the loop: a collective of its own


def test_ranks_that_go_on_in_a_group_of_their_own_wait_for_nobody() -> None:
    of = stopped()
    for one, num in zip(of.present, (2, 1), strict=True):
        joined = [event("pg", done=True, rank=one.rank, world_size=2 - n) for n in range(num)]
        one.__dict__.pop("_by_kind", None)
        one.events[1:1] = joined
    silent(RankLocalDecision, of)


def trained_apart(groups: tuple[list[int] | None, list[int] | None], *met: Event, last: bool = False, wrapped: bool = True) -> Run:
    """Rank 0 takes one epoch more than rank 1, and both come to a good end."""
    wraps = [[event("wrap", index=0, group_size=1, group_ranks=group)] if wrapped else [] for group in groups]
    own = [[loop_event(1), *wrap, *trained(0, 2), *met] for wrap in wraps]
    rows = ([row(i, num_batches=1, t_ns=10**9) for i in range(4)], [row(i, num_batches=1, t_ns=10**9) for i in range(2)])
    ends = [[*([event("coll", s=s, op="all_reduce", world=True)] if last else []), event("end", s=s)] for s in (4, 2)]
    told = ([*own[0], *trained(1, 4), *ends[0]], [*own[1], *ends[1]])
    return builder.run([recording(events, rows[rank], rank=rank) for rank, events in enumerate(told)])


def test_ranks_that_train_apart_decide_apart() -> None:
    said(RankLocalDecision, trained_apart((None, None)))
    silent(RankLocalDecision, trained_apart(([0], [1])))  # an ensemble: a member each
    said(RankLocalDecision, trained_apart(([0], [1]), event("coll", s=1, op="all_reduce", world=True)))  # they meet while they train
    silent(RankLocalDecision, trained_apart(([0], [1]), last=True))  # behind the training
    silent(RankLocalDecision, trained_apart((None, None), last=True, wrapped=False))  # folds: nothing goes from rank to rank while they train
    said(RankLocalDecision, trained_apart((None, None), event("coll", s=1, op="all_reduce", world=True), wrapped=False))
    silent(RankLocalDecision, trained_apart(([0], [1]), event("new_group", ranks=[0]), event("new_group", ranks=[1]),
                                            event("new_group", ranks=[0, 1]), event("coll", s=1, op="all_reduce", world=False, group_size=1)))  # fmt: skip


def test_broke_off_in_mid_epoch() -> None:
    rows = [row(i, num_batches=1, t_ns=1 << 60) for i in range(3)]
    left = [loop_event(0), *trained(0, 2, num_batches=2, complete=False)]
    left[1].data["planned"] = 5  # type: ignore[index]
    stayed = [loop_event(0), *trained(0, 2, closed=False)]
    found = said(RankLocalDecision, two(left, stayed, rows=(rows, rows), exits=(-9, -9), reason="hang"))
    assert found.ranks == (0,)


def test_a_rank_that_failed_has_not_decided() -> None:
    left = [loop_event(1), *trained(0, 2), event("failure", line=52, type="ValueError", message="x", frames=[site(52)])]
    stayed = [loop_event(1), *trained(0, 2), *trained(1, 4, closed=False)]
    silent(RankLocalDecision, two(stayed, left, exits=(-9, 1)))


def modes(*told: tuple[int, bool], dropout: int = 1) -> list[Event]:
    return [event("layers", opt=0, dropout=dropout, batchnorm=0), *(event("step_mode", s=s, opt=0, training=t) for s, t in told)]


def test_stays_in_eval() -> None:
    rows = [row(i) for i in range(8)]
    switched = [event("mode", line=44, s=4, training=False)]
    found = said(StaysInEval, two(*([*modes((0, True), (4, False)), *switched] for _ in range(2)), rows=(rows, rows)))
    assert found.where is not None and found.where.line == 44 and "steps 4 to 7" in found.message
    silent(StaysInEval, two(*(modes((0, True), (4, False), (6, True)) for _ in range(2)), rows=(rows, rows)))
    silent(StaysInEval, two(*(modes((0, False)) for _ in range(2)), rows=(rows, rows)))  # from the start: meant
    silent(StaysInEval, two(*(modes((0, True), (4, False), dropout=0) for _ in range(2)), rows=(rows, rows)))
    silent(StaysInEval, two(modes((0, True), (4, False)), modes((0, True)), rows=(rows, rows)))  # one rank: SYN120


def test_layers_in_eval_mode_by_another_module() -> None:
    rows = [row(i) for i in range(8)]
    told = event("shared_eval", line=32, s=4, module="Net", layers=["drop"], steps=4, whole=True)
    found = said(StaysInEval, two(*([*modes((0, True)), told] for _ in range(2)), rows=(rows, rows)))
    assert found.where is not None and found.where.line == 32 and "another Net" in found.message
    silent(StaysInEval, two([*modes((0, True)), told], modes((0, True)), rows=(rows, rows)))  # one rank: another mistake
    part = event("shared_eval", line=32, s=4, module="Sequential", layers=["drop"], steps=4, whole=False)  # frozen so, maybe
    assert said(StaysInEval, two(*([*modes((0, True)), part] for _ in range(2)), rows=(rows, rows))).severity is Severity.ADVICE


def test_statistics_frozen_on_purpose() -> None:
    """eval(), and training goes on at once; the evaluation of step 4 came before it and was left by train(). Without that, a context manager
    restored the mode that it had set."""
    rows = [row(i) for i in range(8)]

    def of(rank: int, *, measures: bool, left: bool = True) -> list[Event]:
        before = [] if measures else [*measured(1, 4, rank=rank), *([event("mode", line=47, s=4, training=True)] if left else [])]
        off = event("mode", line=48, s=4, training=False)
        return [*modes((0, True), (4, False)), *before, off, *(measured(1, 4, rank=rank) if measures else [])]

    def severity(**told: bool) -> Severity:
        return said(StaysInEval, two(*(of(r, **told) for r in range(2)), rows=(rows, rows))).severity

    assert severity(measures=False) is Severity.ADVICE
    assert severity(measures=True) is severity(measures=False, left=False) is Severity.ERROR


def never(switch: dict[str, Any], *before: Event) -> Run:
    told = {"root_training": True, "dropout": 1, "batchnorm": 0, "body_random": True, "batchnorm_moved": False} | switch
    return two(
        *(
            [event("layers", opt=0, dropout=1, batchnorm=0), *trained(0, 2), *before, *measured(1, 2, rank=r, training=True, switch=told)]
            for r in range(2)
        )
    )


def test_never_evals() -> None:
    assert "Dropout drew masks" in said(NeverEvals, never({})).message
    assert "BatchNorm" in said(NeverEvals, never({"body_random": False, "batchnorm_moved": True})).message
    silent(NeverEvals, never({"body_random": False}))
    silent(NeverEvals, never({"root_training": False}))
    silent(NeverEvals, never({}, event("mode", line=48, s=2, training=True)))  # recalibration


def summed(text: str, before: tuple[float, float], after: float, more: Callable[[int], list[Event]] = lambda rank: []) -> Run:
    own = []
    for rank in range(2):
        events = more(rank) + trained(0, 2) + measured(1, 2, rank=rank) + [reduced([before[rank]], [after], s=2)]
        own.append(events + ([says(text, s=2, y=6)] if rank == 0 else []))
    return two(*own, rows=(losses(0.5, 0.4), losses(0.6, 0.3)))


def test_sum_of_means() -> None:
    found = said(MetricSumNotDivided, summed("accuracy 0.8512", (0.4212, 0.43), 0.8512))
    assert found.where is not None and found.where.line == 55
    silent(MetricSumNotDivided, summed("accuracy 0.4256", (0.4212, 0.43), 0.8512))
    silent(MetricSumNotDivided, summed("accuracy total 0.8512", (0.4212, 0.43), 0.8512))
    silent(MetricSumNotDivided, summed("loss 85.12", (42.12, 43.0), 85.12))  # a sum of sums, for all one can tell


def test_what_the_source_divides_by_the_number_of_ranks_is_no_sum() -> None:
    one = summed("Acc@1 0.120 (0.8512)", (0.4212, 0.43), 0.8512)
    for recording_ in one.present:
        recording_.of("reduced")[0].data["by_ranks"] = True  # type: ignore[index]
    silent(MetricSumNotDivided, one)


def test_the_sum_of_one_metric_is_the_mean_of_another() -> None:
    """Top-1 12.5 % on both ranks, top-5 25 %: divided as it should be."""
    def both(*, top5: float) -> Run:
        return two(
            *(
                trained(0, 2) + measured(1, 2, rank=rank) + [reduced([0.125], [0.25], s=2), reduced([top5], [2 * top5], s=2, line=56)]
                + ([says("Acc@1 0.1250 Acc@5 0.2500", s=2, y=6)] if rank == 0 else [])
                for rank in range(2)
            ),
            rows=(losses(0.5, 0.4), losses(0.6, 0.3)),
        )

    silent(MetricSumNotDivided, both(top5=0.25))
    said(MetricSumNotDivided, both(top5=0.375))


def test_epoch_loss_not_divided() -> None:
    found = said(MetricSumNotDivided, summed("train loss 0.9000", (0.9, 0.9), 1.8))
    assert "2 times the mean loss" in found.message
    silent(MetricSumNotDivided, summed("train loss 0.4500", (0.9, 0.9), 1.8))


@pytest.mark.parametrize(("values", "are_shares"), [((2.0, 2.0), True), ((4.0, 4.0), False), ((2.0, 4.0), False), ((2.0,), False)])
def test_a_loss_that_is_divided_by_the_number_of_ranks_is_shown_as_it_was_before(values: tuple[float, ...], are_shares: bool) -> None:
    def divided(rank: int) -> list[Event]:
        return [event("divisor", line=41, s=s, made=["train.py", 40, ""], value=v) for s, v in enumerate(values)]

    for text, before in (("train loss 0.9000", (0.9, 0.9)), ("loss 0.9000", (0.45, 0.45))):
        (silent if are_shares else said)(MetricSumNotDivided, summed(text, before, sum(before), divided))
    said(MetricSumNotDivided, summed("accuracy 0.8512", (0.4212, 0.43), 0.8512, divided))


def trained_on_shares(rank: int, factor: float, weight: float) -> list[Event]:
    """Losses divided by the count of all ranks and times `factor` (0: by a number that nobody reduced); gradients averaged by hand to `weight`
    times their sum."""
    told = [event("loss", line=41, scaled=True, reduction="sum", root=[])]
    for s in range(5 if factor else 0):
        told.append(event("reduced", line=36, op="all_reduce", reduce="sum", before=[16.0], after=[32.0], rows=16, at=s, s=s, at_t=s))
        quotient = {"value": 32.0, "same": True, "above": [factor], "below": [], "mean": False}
        told.append(event("share", line=41, s=s, made=None, quotients=[quotient], given=False, made_up=False))
    for s in range(3):
        synced = {"0": [3.0 * weight]}
        told.append(event("gradients", opt=0, s=s, local={"0": [1.0 + rank]}, synced=synced, at_step=synced))
    return told


@pytest.mark.parametrize(("factor", "weight"), [(1.0, 0.5), (1.0, 1.0), (2.0, 0.5), (0.0, 1.0), (0.0, 0.5)])
def test_losses_that_are_shares_of_one_mean_add_up_to_it(factor: float, weight: float) -> None:
    """Divided by the count of all ranks, however the gradients are averaged, or gradients that are summed up."""
    shares = factor == 1.0 or weight == 1.0
    for text, before in (("train loss 0.9000", (0.9, 0.9)), ("loss 0.9000", (0.45, 0.45)), ("accuracy 0.8512", (0.4212, 0.43))):
        one = summed(text, before, sum(before), lambda rank: trained_on_shares(rank, factor, weight))
        if shares and not text.startswith("accuracy"):
            silent(MetricSumNotDivided, one)
        else:
            said(MetricSumNotDivided, one)


def averaged(sizes: tuple[int, int], *, count: bool, text: str = "accuracy 0.4600") -> Run:
    means = (0.42, 0.50)
    own = []
    for rank in range(2):
        before = [means[rank], float(sizes[rank])] if count else [means[rank]]
        after = [0.92, float(sum(sizes))] if count else [0.92]
        events = trained(0, 2) + measured(1, 2, rank=rank, num_samples=sizes[rank]) + [reduced(before, after, s=2)]
        own.append(events + ([says(text, s=2, y=6)] if rank == 0 else []))
    return two(*own)


def test_mean_of_unequal_means() -> None:
    found = said(MeanOfUnequalMeans, averaged((12, 8), count=False))
    assert "weighted by the samples it is 0.452" in found.notes[0]
    silent(MeanOfUnequalMeans, averaged((10, 10), count=False))
    silent(MeanOfUnequalMeans, averaged((12, 8), count=True))
    silent(MeanOfUnequalMeans, averaged((12, 8), count=False, text="accuracy 0.4520"))


def metrics(*values: float, how: str = "ratio", text: str = "F1 0.4600", kind: str = "sum", told: bool = True) -> Run:
    """Each rank measures a share, gives its own F1 to a reduction, and rank 0 prints a line."""
    own = []
    for rank in range(2):
        events = [*trained(0, 2), *measured(1, 2, rank=rank), reduced([values[rank]], [sum(values)], s=2, kind=kind)]
        if told:
            events[-1].data["metric"] = {"metric": "f1", "how": how, "index": 0}  # type: ignore[index]
        own.append(events + ([says(text, s=2, y=6)] if rank == 0 else []))
    return two(*own)


def test_mean_of_metrics() -> None:
    found = said(MeanOfMetrics, metrics(0.42, 0.50))
    assert found.severity is Severity.WARNING and found.where and found.where.line == 55
    assert said(MeanOfMetrics, metrics(0.42, 0.50, kind="avg", text="done")).severity is Severity.WARNING
    assert said(MeanOfMetrics, metrics(0.42, 0.50, how="name")).severity is Severity.ADVICE
    silent(MeanOfMetrics, metrics(0.46, 0.46))  # every rank has the metric of the whole set
    silent(MeanOfMetrics, metrics(0.42, 0.50, told=False))  # an accuracy
    silent(MeanOfMetrics, metrics(0.42, 0.50, text="F1 0.4580"))  # something else is made of them
    silent(MeanOfMetrics, metrics(0.42, 0.50, kind="max"))


def test_a_count_over_the_length_of_the_whole_set() -> None:
    def run(text: str, y: int = 5, whole: bool = True, collectives: int = 0) -> Run:
        own = []
        for rank in range(2):
            told = event("loop", line=30, of="loader", whole=site(35) if whole else None)
            drawn = trained(0, 2, y=5, opened=sampler(rank), collectives=collectives)
            own.append([told, *drawn, *([says(text, s=2, y=y)] if rank == 0 else [])])
        return two(*own, rows=(losses(0.5, 0.4), losses(0.6, 0.3)))

    found = said(MetricFromOneShard, run("acc 0.412"))
    assert found.where and found.where.line == 35 and "its 10 samples is divided by the 20" in found.message
    silent(MetricFromOneShard, run("acc 0.412", whole=False))
    silent(MetricFromOneShard, run("acc 0.412", y=6))  # reduced in between
    silent(MetricFromOneShard, run("acc 0.412", collectives=1))
    silent(MetricFromOneShard, run("[rank 0] acc 0.412"))


def test_values_of_a_line() -> None:
    line = Report(0, None, 0, 0, 0, "epoch 3 lr 0.0100 loss 1.2345 acc 87.50% took 2.31 s, 1.5e-3", "print")
    assert [(v.value, v.digits) for v in line.values()] == [(1.2345, 5), (87.5, 4), (0.0015, 2)]
    assert Value(0.45, 0.01).is_near(0.4549) and not Value(0.45, 0.01).is_near(0.456)


def gathered(values: list[float], *, s: int, leaves: int | None = None, cut: bool = True) -> Event:
    one = event(
        "gathered", line=55, s=s, y=6, op="all_gather_object", values=values, leaves=len(values) if leaves is None else leaves, at=s, cut=cut
    )
    one.data["at_t"] = one.t_ns  # type: ignore[index]
    return one


def test_means_gathered_as_objects() -> None:
    def run(text: str, sizes: tuple[int, int]) -> Run:
        own = []
        for rank, mean in enumerate((0.42, 0.50)):
            events = trained(0, 2) + measured(1, 2, rank=rank, num_samples=sizes[rank])
            own.append([*events, gathered([mean], s=2), *([says(text, s=2, y=6)] if rank == 0 else [])])
        return two(*own)

    said(MeanOfUnequalMeans, run("accuracy 0.4600", (12, 8)))
    silent(MeanOfUnequalMeans, run("accuracy 0.4600", (10, 10)))
    said(MetricSumNotDivided, run("accuracy 0.9200", (10, 10)))


@pytest.mark.parametrize(("leaves", "cut", "counted"), [(2, True, True), (10, True, False), (10, False, True)])
def test_padding_in_gathered_objects(leaves: int, cut: bool, counted: bool) -> None:
    own = []
    for rank in range(2):
        events = trained(0, 2) + measured(1, 2, rank=rank, opened=sampler(rank, size=19))
        own.append([*events, gathered([], s=2, leaves=leaves, cut=cut), event("coll", line=55, s=2, y=5, op="all_gather_object", numel=-1)])
    found = builder.findings(EvalPaddingDuplicates, two(*own))
    assert bool(found) is counted


@pytest.mark.parametrize(("batch_size", "sums", "counted"), [(1, (10.0, 10.0), False), (4, (3.0, 3.0), False), (4, (10.0, 10.0), True)])
def test_a_meter_reduced_before_results_are_gathered(batch_size: int, sums: tuple[float, float], counted: bool) -> None:
    """Of batches, say: what is evaluated goes with the gather, from which repeated samples may be taken out."""
    own = []
    for rank in range(2):
        events = trained(0, 2) + measured(1, 2, rank=rank, opened={**sampler(rank, size=19), "batch_size": batch_size})
        meter = [event("coll", line=50, s=2, y=4, op="all_reduce", numel=2), reduced([sums[rank], 0.1], [sum(sums), 0.2], s=2)]
        gather = [gathered([], s=2, leaves=10), event("coll", line=55, s=2, y=5, op="all_gather_object", numel=-1)]
        own.append([*events, *meter, *gather])
    assert bool(builder.findings(EvalPaddingDuplicates, two(*own))) is counted


def test_a_train_that_takes_no_notice_of_its_mode() -> None:
    against = event("mode", line=14, s=2, training=True, against=True, module="Segmenter")
    found = said(NeverEvals, never({}, event("mode", line=60, s=2, training=False), against))
    assert found.where is not None and found.where.line == 14 and found.message.startswith("train() of Segmenter takes no notice")
    silent(NeverEvals, never({}, against, event("mode", line=48, s=2, training=True, against=False)))  # meant after all


def test_a_number_read_after_all_was_sent_to_one_rank() -> None:
    def run(op: str) -> Run:
        ranks = []
        for rank in range(2):
            read = {"num": 1, "rows": 10, "mean": (0.8123, 0.4)[rank], "weighted": (0.8123, 0.4)[rank], "total": 1.0, "sum": 1.0}
            told = [event("coll", line=38, s=2, op=op, done=True)]
            told += [event("measured", line=41, s=2, of=of, at=2, at_y=4, first_t=5, last_t=10**15, targets=7 + rank, **read) for of in ("loss", "item")]
            told[1].data["mean"] = told[1].data["weighted"] = 0.3 + rank  # type: ignore[index]
            ranks.append(trained(0, 2) + told + ([event("print", t=10**15 + 1, s=2, y=9, line=60, text="val_f1 0.8123")] if rank == 0 else []))
        return two(*ranks, rows=(losses(0.5, 0.4), losses(0.6, 0.3)))

    said(MetricFromOneShard, run("all_reduce"))
    silent(MetricFromOneShard, run("reduce"))


# ---- EVL109 ----
def again(local: list[list[list[float]]], *, carry: bool, at: list[int] | None = None, op: str = "all_reduce", told: str = "reduced", **more: Any) -> Run:
    """Reductions of one line: `local[rank][n]` is what a rank adds before the n-th; `carry` puts the result into the next one."""
    world, own = len(local), [list(v[0]) for v in local]
    events: list[list[Event]] = [[] for _ in local]
    for n in range(len(local[0])):
        if n:
            own = [[a + b for a, b in zip(own[r], local[r][n], strict=True)] for r in range(world)]
        total = [sum(column) for column in zip(*own, strict=True)]
        for rank in range(world):
            got = total if op == "all_reduce" or rank == 0 else own[rank]
            one = reduced(own[rank], got, s=at[n] if at else 4, told=told)
            one.data.update(op=op, **more)  # type: ignore[attr-defined]
            events[rank].append(one)
        if carry:
            own = [list(total) if op == "all_reduce" or rank == 0 else own[rank] for rank in range(world)]
    return two(*events)


def batches(num: int, hits: int = 7) -> list[list[list[float]]]:
    return [[[float(hits + (n + r) % 3), 12.0] for n in range(num)] for r in range(2)]


def test_totals_reduced_at_every_batch() -> None:
    found = said(TotalsReducedAgain, again(batches(5), carry=True))
    assert found.where is not None and found.where.line == 55 and found.ranks == (0, 1) and "5 in a row" in found.message
    assert said(TotalsReducedAgain, again(batches(5), carry=True, op="reduce")).ranks == (0,)
    said(TotalsReducedAgain, again(batches(5), carry=True, at=[5, 10, 15, 20, 25]))  # a running mean at each log line


def test_meters_reduced_in_turn_by_one_statement() -> None:
    """A helper reduces the counts and the losses of each batch: the totals are made of python numbers, each time in a new tensor."""
    one = [again([[v[:1] for v in own] for own in batches(5, hits)], carry=True) for hits in (3, 40)]
    mixed = []
    for rank in range(2):
        mixed.append([e for pair in zip(*(r.ranks[rank].of("reduced") for r in one), strict=True) for e in pair])  # type: ignore[union-attr]
    assert "5 in a row" in said(TotalsReducedAgain, two(*mixed)).message


def test_a_confusion_matrix_is_known_by_its_sum() -> None:
    local = [[[12.0 + n + r] for n in range(5)] for r in range(2)]
    assert said(TotalsReducedAgain, again(local, carry=True, told="reduced_total", low=0.0)).ranks == (0, 1)
    silent(TotalsReducedAgain, again(local, carry=True, told="reduced_total", low=-0.5))  # no counts: parameters, activations


def test_what_only_grows_is_not_reduced_again() -> None:
    silent(TotalsReducedAgain, again(batches(8), carry=False))  # local totals, reduced into a copy at each log line
    powers = [[[float(2**n if n < 1 else 2 ** (n - 1)), 1.0] for n in range(7)]] * 2
    silent(TotalsReducedAgain, again(powers, carry=False, at=[1, 2, 4, 8, 16, 32, 64]))  # told at steps 1, 2, 4, 8
    tens = [[[float(9 * 10**n), 10.0**n] for n in range(5)]] * 2
    silent(TotalsReducedAgain, again(tens, carry=False, at=[1, 10, 100, 1000, 10000]))
    silent(TotalsReducedAgain, again(batches(5), carry=True, reduce="max"))
    silent(TotalsReducedAgain, again(batches(5), carry=True, reduce="avg"))


def test_one_number_in_a_new_tensor_may_double_of_itself() -> None:
    rising = [[[0.0018 * 1.15**n] for n in range(5)] for _ in range(2)]  # a divergence between policies, by epoch
    silent(TotalsReducedAgain, again(rising, carry=True, same=False))
    said(TotalsReducedAgain, again(rising, carry=True, same=True))
    said(TotalsReducedAgain, again([[[5.0 + n] for n in range(5)]] * 2, carry=True, same=False))  # a count
    said(TotalsReducedAgain, again([[[0.0018 * 1.15**n] for n in range(9)]] * 2, carry=True, same=False))


def test_a_sum_that_is_divided_or_sent_is_not_reduced_again() -> None:
    shared = [[reduced([1.0 + 0.1 * n, 3.0], [2.0 + 0.2 * n, 6.0], s=n) for n in range(6)] for _ in range(2)]
    silent(TotalsReducedAgain, two(*shared))  # EMA buffers, parameters: summed, then divided by world_size
    sent = [[reduced([2.0**n] if rank == 0 else [0.0], [2.0**n], s=n) for n in range(6)] for rank in range(2)]
    silent(TotalsReducedAgain, two(*sent))  # one rank gives it, the others give zeros
    groups = [[reduced([8.0], [16.0], s=4), reduced([16.0], [32.0], s=4), reduced([32.0], [64.0], s=4)] * 3 for _ in range(2)]
    silent(TotalsReducedAgain, two(*groups))  # the same sum over ever larger groups of ranks


# ---- EVL110 ----
def dropping(per_rank: int, size: int, *, loader: bool = True, in_sampler: bool = False, text: str = "test mae 0.4501", **more: Any) -> Run:
    own = []
    for rank in range(2):
        opened = sampler(rank, size=size, total=2 * per_rank, drop_last=in_sampler) | {"dataset_len": size, "drop_last": loader, "dataset_id": 2, "loader": 2}
        opened["distributed"]["shuffle"] = more.get("shuffle", False)
        indices = pack(list(range(rank, 2 * per_rank, 2)))
        test = measured(1, 2, rank=rank, opened=opened | more, num_samples=per_rank, indices=indices, complete=more.get("complete", True))
        own.append(trained(0, 2, opened={"dataset_id": 1}) + test + ([says(text, s=2)] if rank == 0 else []))
    return two(*own, rows=(losses(0.5, 0.4), losses(0.6, 0.3)))


def test_samples_that_an_evaluation_drops() -> None:
    found = said(EvalDropsSamples, dropping(64, 140))
    assert found.severity is Severity.WARNING and found.message.startswith("12 of 140 samples") and found.where is not None
    assert said(EvalDropsSamples, dropping(70, 141, loader=False, in_sampler=True)).severity is Severity.ADVICE
    of_sampler = said(EvalDropsSamples, dropping(10, 21, loader=False, in_sampler=True))
    assert "sampler drops" in of_sampler.message and of_sampler.severity is Severity.ADVICE


def test_the_rest_is_measured_in_a_pass_of_its_own() -> None:
    rest = measured(9, 2, opened={"loader": 3, "dataset_id": 3, "subset": {"of": 140, "num": 12}})
    own = [[*recorded.events[1:], *rest] for recorded in dropping(64, 140).present]
    silent(EvalDropsSamples, two(*own))


def test_an_evaluation_that_drops_nothing_or_other_samples_each_time() -> None:
    silent(EvalDropsSamples, dropping(64, 128))  # it divides
    silent(EvalDropsSamples, dropping(64, 140, loader=False))  # a share that somebody else cut
    silent(EvalDropsSamples, dropping(64, 140, shuffle=True))
    silent(EvalDropsSamples, dropping(64, 140, complete=False))  # the script stops after some batches
    silent(EvalDropsSamples, dropping(64, 140, dataset_id=1))  # the training set: BatchNorm statistics, training accuracy
    silent(EvalDropsSamples, dropping(64, 140, text="took 3.20 s"))  # features are extracted, nothing is measured


def gathered_classes(text: str, *, hits: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7, 8), size: int = 10) -> Run:
    """Ten samples of classes 0..9 dealt out by turns to two ranks; the samples in `hits` are predicted right, the others as class 99."""
    own = []
    for rank in range(2):
        mine = list(range(rank, size, 2))
        classes = [i if i in hits else 99 for i in mine]
        drawn = measured(1, 2, rank=rank, indices=pack(mine), labels=pack(mine), num_samples=len(mine))
        gather = event("gathered", line=55, s=2, y=6, op="all_gather", classes=pack(classes), leaves=len(mine), joined=site(57))
        own.append([*trained(0, 2), *drawn, gather, *([says(text, s=2, y=6)] if rank == 0 else [])])
    return two(*own)


def test_gathered_in_shard_order() -> None:
    found = said(GatheredInShardOrder, gathered_classes("accuracy 0.100"))  # 0 2 4 6 8 1 3 5 7 99 against 0 1 2 3 4 5 6 7 8 9: one is right
    assert found.severity is Severity.ERROR and found.where and found.where.line == 57 and "own labels 0.9000" in found.message
    said(GatheredInShardOrder, gathered_classes("accuracy 10.0 %"))
    silent(GatheredInShardOrder, gathered_classes("accuracy 0.900"))  # also what they are when taken by turns
    silent(GatheredInShardOrder, gathered_classes("accuracy 0.452"))
    silent(GatheredInShardOrder, gathered_classes("accuracy 0.100", hits=(0,)))  # the same either way


def gathered_scores(texts: list[str], *, hits: range = range(60), size: int = 64, labels: bool = False) -> Run:
    """As above, of several evaluations, with a row of scores for each sample; the classes are the samples' numbers."""
    own = []
    for rank in range(2):
        mine = list(range(rank, size, 2))
        told = [*trained(0, 2)]
        for n, text in enumerate(texts):
            best = [i if i in hits else 99 for i in mine]
            told += measured(1 + n, 2 + n, rank=rank, indices=pack(mine), labels=pack(mine), num_samples=len(mine))
            told.append(event("gathered", line=55, s=2 + n, y=6, op="all_gather", scored=pack(best), leaves=9 * len(mine), joined=site(57)))
            told += [event("gathered", line=56, s=2 + n, y=6, op="all_gather", classes=pack(mine), joined=site(58))] if labels else []
            told += [says(text, s=2 + n, y=6)] if rank == 0 else []
        own.append(told)
    return two(*own)


def test_scores_gathered_in_shard_order() -> None:
    wrong = "top1 0.0156"  # sample 0 alone is in its place; 60 of 64 are right
    found = said(GatheredInShardOrder, gathered_scores([wrong, wrong]))
    assert found.severity is Severity.ERROR and found.where and found.where.line == 57 and "own labels 0.9375" in found.message
    silent(GatheredInShardOrder, gathered_scores(["top1 0.9375", "top1 0.9375"]))
    silent(GatheredInShardOrder, gathered_scores([wrong, "top1 0.2220"]))  # seen once: a coincidence
    silent(GatheredInShardOrder, gathered_scores([wrong + ", loss 0.9375", wrong]))  # what is right is reported too
    silent(GatheredInShardOrder, gathered_scores(["top1 0.016", "top1 0.016"]))  # of two digits
    silent(GatheredInShardOrder, gathered_scores([wrong, wrong], hits=range(12)))  # the best column may be no class


def test_scores_and_labels_that_are_gathered_alike_beside_a_number_like_the_wrong_accuracy() -> None:
    perfect = "threshold 0.03125 top1 1.0000"
    silent(GatheredInShardOrder, gathered_scores([perfect] * 2, hits=range(64), labels=True))
    said(GatheredInShardOrder, gathered_scores([perfect] * 2, hits=range(64)))  # without the labels 1.0 may be of the training
    silent(GatheredInShardOrder, gathered_scores(["threshold 0.03125 top1 0.9375"] * 2, labels=True))  # nor are the labels taken for predictions
    said(GatheredInShardOrder, gathered_scores(["top1 0.0156"] * 2, labels=True))


def test_rows_that_are_taken_for_samples() -> None:
    def run(dealt: tuple[list[int], list[int]], num: int = 5, told: bool = True) -> Run:
        own = []
        for rank, mine in enumerate(dealt):
            drawn = measured(1, 2, rank=rank, opened=sampler(rank), indices=pack(mine), num_samples=num)
            more = {"numbered": site(51)} if told else {}
            own.append([*trained(0, 2), *drawn, event("gathered", line=50, s=2, y=6, op="all_gather", leaves=16 * num, **more)])
        return two(*own)

    by_turns = ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])
    found = said(GatheredInShardOrder, run(by_turns))
    assert found.where is not None and found.where.line == 51 and "row 1 is sample 2" in found.notes[0]
    silent(GatheredInShardOrder, run(([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])))  # dealt in blocks: row i is sample i
    silent(GatheredInShardOrder, run(by_turns, told=False))


def test_a_choice_of_each_shard_that_is_added_up() -> None:
    def run(before: tuple[list[float], list[float]], kind: str = "sum", told: bool = True) -> Run:
        own = []
        for rank in range(2):
            one = reduced(before[rank], [7.0, 20.0], s=2, kind=kind)
            one.data["chosen"] = {"site": site(30), "scores": "hits", "chosen": "GRID"} if told else None  # type: ignore[index]
            own.append([*trained(0, 2), one])
        return two(*own)

    found = said(ChosenByEachShard, run(([3.0, 10.0], [4.0, 10.0])))
    assert found.where is not None and found.where.line == 30 and found.severity is Severity.WARNING and "`GRID`" in found.message
    silent(ChosenByEachShard, run(([3.0, 10.0], [3.0, 10.0])))  # each rank measures all of it
    silent(ChosenByEachShard, run(([3.0, 10.0], [4.0, 10.0]), kind="max"))
    silent(ChosenByEachShard, run(([3.0, 10.0], [4.0, 10.0]), told=False))


def padded(shown: tuple[str, str], *, lengths: tuple[int, int] = (10, 8), gathered: int = 10) -> Run:
    """Two evaluations; 9 of 10 and 7 of 8 are right, and the padding of the second rank is zeros on both sides."""
    own: list[list[Event]] = []
    for rank, num in enumerate(lengths):
        told: list[Event] = [*trained(0, 2)]
        for n in range(2):
            s = 2 + n
            labels = [*range(1, num + 1), *[0] * (gathered - num)]
            guesses = [99, *labels[1:]]
            told += measured(1 + n, s, rank=rank, num_samples=num)
            told += [event("gathered", line=22, s=s, y=6, op="all_gather", classes=pack(v), leaves=gathered, joined=site(23)) for v in (guesses, labels)]
            told += [says(shown[n], s=s, y=6)] if rank == 0 else []
        own.append(told)
    return two(*own)


def test_padding_that_is_scored() -> None:
    found = said(GatheredPaddingCounted, padded(("accuracy 0.900", "accuracy 0.900")))  # 18 of 20; of the samples 16 of 18
    assert found.where is not None and found.where.line == 23 and "accuracy 0.9000, of the samples themselves 0.8889" in found.message
    silent(GatheredPaddingCounted, padded(("accuracy 0.889", "accuracy 0.889")))
    silent(GatheredPaddingCounted, padded(("accuracy 0.900", "accuracy 0.889")))
    silent(GatheredPaddingCounted, padded(("accuracy 0.900", "recall 0.444")))  # seen once: a coincidence
    silent(GatheredPaddingCounted, padded(("accuracy 0.900", "accuracy 0.900"), lengths=(10, 10)))
    silent(GatheredPaddingCounted, padded(("accuracy 0.900", "accuracy 0.900"), lengths=(8, 8)))  # padded to something else


def test_accuracies_of_unequal_batches() -> None:
    def run(sizes: list[int], told: bool = True, batches: int = 4, **ended: Any) -> Run:
        loop = event("loop", line=40, of="loader", batch_means=site(42) if told else None)
        own = [loop, *one_pass(1, line=40, s=2, batch_sizes=sizes, num_batches=batches, **ended)]
        return two(own, own)

    found = said(MeanOfBatchMeans, run([16, 2, 2]))
    assert found.where is not None and found.where.line == 42 and "8.0 times" in found.notes[0]
    silent(MeanOfBatchMeans, run([16, 16, 16]))
    silent(MeanOfBatchMeans, run([16, 10, 10]))
    silent(MeanOfBatchMeans, run([16, 2, 2], told=False))
    silent(MeanOfBatchMeans, run([16, 2, 2], backwards=4, steps=4))  # a meter of training
    silent(MeanOfBatchMeans, run([16, 2, 2], batches=400))


def test_candidates_of_one_shard() -> None:
    def run(pairs: bool = True, inputs: tuple[int, int] = (3, 4)) -> Run:
        one = hand_made(inputs)
        events = []
        for recording_ in one.present:
            told = reduced([3.0, 10.0], [7.0, 20.0], s=2)
            told.data["pairs"] = site(52) if pairs else None  # type: ignore[index]
            events.append([*recording_.events, told, *([says("recall@1 0.350", s=2)] if not events else [])])
        return two(*events)

    found = said(CandidatesOfOneShard, run())
    assert found.where and found.where.line == 52 and "not with all 20" in found.message
    silent(CandidatesOfOneShard, run(pairs=False))
    silent(CandidatesOfOneShard, run(inputs=(3, 3)))  # every rank has the whole set


def test_candidates_of_the_own_cut() -> None:
    def run(pairs: bool = True, says_so: bool = True) -> Run:
        events = []
        for _ in range(2):
            told = reduced([3.0], [7.0], s=2)
            told.data["own_pairs"] = site(46) if pairs else None  # type: ignore[index]
            events.append([*trained(0, 2), told, *([says("recall@1 0.350", s=2)] if says_so and not events else [])])
        return two(*events)

    found = said(CandidatesOfOneShard, run())
    assert found.where and found.where.line == 46 and "1/2 of all" in found.message
    silent(CandidatesOfOneShard, run(pairs=False))
    silent(CandidatesOfOneShard, run(says_so=False))  # nobody is told a number


def test_a_sampler_that_shuffles_has_no_order_of_the_data_set() -> None:
    dealt = ([3, 7, 1, 9, 0], [2, 8, 5, 4, 6])
    own = []
    for rank, mine in enumerate(dealt):
        opened = {"distributed": sampler(rank)["distributed"] | {"shuffle": True}, "made_sampler": site(15)}
        drawn = measured(1, 2, rank=rank, opened=opened, indices=pack(mine), labels=pack(mine), num_samples=5)
        gather = event("gathered", line=55, s=2, y=6, op="all_gather", classes=pack(mine), leaves=5, joined=site(57))
        own.append([*trained(0, 2), *drawn, gather, *([says("accuracy 0.000, by turns 0.100", s=2, y=6)] if rank == 0 else [])])
    found = said(GatheredInShardOrder, two(*own))  # by turns 3 2 7 8 1 5 9 4 0 6: one is right, the 5 in place 5
    assert "by turns" in found.message and found.where and found.where.line == 15


def test_a_functional_dropout_that_eval_does_not_switch_off() -> None:
    told = event("dropout_always", line=23, function="dropout2d", module="Classifier")
    (found,) = builder.findings(DropoutStaysOn, builder.run([recording([told])]))
    assert found.where is not None and found.where.line == 23 and "nn.Dropout2d" in found.help
    assert builder.findings(DropoutStaysOn, builder.run([recording()])) == []



def saved_by(*told: tuple[str, float], s: int, line: int = 71) -> Event:
    at = {"file": "/home/u/train.py", "line": line, "func": "fit", "text": "if loss < best:"}
    return event("save_decided", line=line + 1, s=s, y=6, at=at, compared=[list(one) for one in told])


def chosen(*values: float, sums: tuple[tuple[float, float], ...] = ((41.0, 49.0), (30.0, 50.0)), savers: tuple[int, ...] = (0,)) -> Run:
    """Two ranks of 30 samples each; after epoch e rank 0 compares values[e] and saves."""
    own: list[list[Event]] = [[], []]
    for epoch, (first, second) in enumerate(sums):
        for rank, part in enumerate((first, second)):
            own[rank].append(reduced([part, 30.0], [first + second, 60.0], s=2 + 2 * epoch))
            if rank in savers and epoch < len(values):
                own[rank].append(saved_by(("loss", values[epoch]), ("best", 9.0), s=2 + 2 * epoch))
    return two(*own, rows=(losses(0.5, 0.4, 0.3, 0.2, 0.1), losses(0.5, 0.4, 0.3, 0.2, 0.1)))


def test_the_best_is_chosen_by_one_share() -> None:
    found = said(BestOfOneShard, chosen(41 / 30, 30 / 30))
    assert found.where and found.where.line == 71 and "`loss`" in found.message and found.ranks == (0,)
    assert found.evidence == {"name": "loss", "value": 1.0, "saves": 2}
    said(BestOfOneShard, chosen(41.0, 31.0, sums=((41.0, 49.0), (31.0, 50.0))))  # the sum itself


@pytest.mark.parametrize(
    "healthy",
    [
        chosen(90 / 60, 80 / 60),  # what came out
        chosen(41 / 30, 80 / 60),  # once by chance
        chosen(45.0, 40.0),  # the mean over the ranks
        chosen(0.7, 0.6),  # another number, that was not reduced
        chosen(41 / 30, 30 / 30, sums=((41.0, 41.0), (30.0, 30.0))),  # all ranks measured the same
        chosen(41 / 30, 30 / 30, savers=(0, 1)),  # each keeps a best file of its own
    ],
)
def test_the_best_is_chosen_by_all(healthy: Run) -> None:
    silent(BestOfOneShard, healthy)


def divided(*lines: str, hits: tuple[tuple[float, float], ...] = ((4.0, 5.0), (6.0, 8.0)), samples: int = 10) -> Run:
    """Two evaluations of some samples a rank; rank 0 says lines[n] after the n-th."""
    own: list[list[Event]] = [[], []]
    for n, line in enumerate(lines):
        for rank in range(2):
            own[rank] += trained(2 * n, 2 + 2 * n) + measured(2 * n + 1, 2 + 2 * n, rank=rank, num_samples=samples)
            own[rank].append(reduced([hits[n][rank] * samples / 10], [sum(hits[n]) * samples / 10], s=2 + 2 * n))
        own[0].append(says(line, s=2 + 2 * n, y=6))
    return two(*own, rows=(losses(0.5, 0.4, 0.3, 0.2), losses(0.6, 0.3, 0.3, 0.2)))


def test_a_sum_divided_by_the_own_count() -> None:
    found = said(SumByOwnCount, divided("accuracy 0.900", "accuracy 1.400"))
    assert found.where and found.where.line == 55 and "1.4, where 0.7 is right" in found.message
    assert "140, where 70 is right" in said(SumByOwnCount, divided("accuracy 90.0 %", "accuracy 140.0 %")).message
    said(SumByOwnCount, divided("accuracy 1.400", hits=((6.0, 8.0),)))  # once is enough: no share of hits is above 1
    silent(SumByOwnCount, divided("accuracy 0.900"))  # once may be chance
    silent(SumByOwnCount, divided("accuracy 0.450", "accuracy 0.700"))
    silent(SumByOwnCount, divided("accuracy 0.900", "accuracy 0.700"))
    silent(SumByOwnCount, divided("[rank 0] 0.900", "[rank 0] 1.400"))
    silent(SumByOwnCount, divided("accuracy 0.400", "accuracy 0.600"))  # its own: EVL102's
    silent(SumByOwnCount, divided("correct 9.000", "correct 14.000"))
    silent(SumByOwnCount, divided("accuracy 0.900", "accuracy 1.400", samples=2))  # as many samples as ranks: means over them, for all one can tell


def counted(*counts: float, trained_on: int = 16, anew: float = 3.0) -> Run:
    """An evaluation of 10 samples a rank after each epoch, and a count that is reduced behind it."""
    own: list[list[Event]] = [[], []]
    for n, count in enumerate(counts):
        for rank in range(2):
            own[rank] += trained(2 * n, 2 + 2 * n, num_samples=trained_on) + measured(2 * n + 1, 2 + 2 * n, rank=rank)
            own[rank].append(reduced([anew, count], [2 * anew, 2 * count], s=2 + 2 * n))
    return two(*own, rows=(losses(*[0.5] * 8), losses(*[0.4] * 8)))


def test_an_evaluation_counts_on() -> None:
    found = said(TotalsKept, counted(10, 20, 30))
    assert found.where and found.where.line == 50 and "3 evaluations of 10 samples" in found.message and "count of 30" in found.message
    silent(TotalsKept, counted(10, 10, 10))
    silent(TotalsKept, counted(10, 20, 10))  # two by chance
    silent(TotalsKept, counted(16, 32, 48))  # samples of training, that are shown with the evaluation
    silent(TotalsKept, counted(10, 20, 30, trained_on=10))
    silent(TotalsKept, counted(10, 20, 30, anew=10.0))  # all samples evaluated so far, beside those of this time


def test_frozen_statistics_that_an_outer_train_sets_moving() -> None:
    def found(frozen: bool, moves: bool = True) -> list[Finding]:
        told = event("frozen_moves", line=29, train=site(50), module="Sequential", norms=2, steps=4, frozen=frozen)
        return builder.findings(FrozenNormMoves, builder.run([recording([event("mode", line=29, training=False), *[told] * moves])]))

    (one,) = found(frozen=True)
    assert one.where is not None and (one.where.line, one.severity) == (50, Severity.WARNING) and "line 29" in one.notes[0]
    assert [f.severity for f in found(frozen=False)] == [Severity.ADVICE]
    assert found(frozen=True, moves=False) == []


def test_dropout_of_a_frozen_part() -> None:
    def severities(frozen: bool, grad: bool, beside: bool = True) -> list[Severity]:
        told = event("frozen_noise", line=29, train=site(50), module="Sequential", drops=1, steps=4, frozen=frozen, grad=grad, beside=beside)
        return [f.severity for f in builder.findings(FrozenNormMoves, builder.run([recording([event("mode", line=29, training=False), told])]))]

    assert severities(True, False) == [Severity.WARNING]
    assert severities(False, False) == severities(True, True) == [Severity.ADVICE]
    assert severities(True, False, beside=False) == [Severity.ADVICE]  # features: nothing that is trained gets its inputs


def test_averaged_weights_with_blank_statistics() -> None:
    of = builder.run([recording([event("untracked", module="Net", num=3, line=50)], [row(0)], rank=r) for r in (0, 1)])
    (found,) = builder.findings(BlankAverage, of)
    assert found.where is not None and found.where.line == 50 and found.ranks == (0, 1)
    assert builder.findings(BlankAverage, builder.run([recording([], [row(0)], rank=r) for r in (0, 1)])) == []


# ---- EVL123: zip() over lists of different length ----
def zipped(*lengths: int, known: bool = True) -> Any:
    told = [event("gathered", line=57, op="all_gather_object", **({"zipped": site(58), "items": n} if known else {})) for n in lengths]
    return run([recording([one], [row(0)], rank=r) for r, one in enumerate(told)])


def test_zip_drops_the_tail() -> None:
    (found,) = findings(zipped_parts.ZippedParts, zipped(71, 70))
    assert (found.code, found.where and found.where.line) == ("EVL123", 58) and "1 of 141 gathered items are lost" in found.message


def test_a_strict_zip_is_judged_and_silent() -> None:
    told = [recording([event("gathered", line=57, op="all_gather_object", strict=True)], [row(0)], rank=r) for r in (0, 1)]
    outcomes, found = judge(run(told), select=("EVL123",))
    assert not found and [o.kind for o in outcomes if o.code == "EVL123"] == [OutcomeKind.RAN]


def test_zip_of_equal_lists() -> None:
    silent = [zipped(71, 71), zipped(2, 2, 2), zipped(71, 70, known=False), zipped(71), zipped(71, 0)]  # the last: one rank has nothing to give
    assert [findings(zipped_parts.ZippedParts, one) for one in silent] == [[]] * len(silent)
