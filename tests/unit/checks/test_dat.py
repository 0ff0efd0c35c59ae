"""The data checks on runs made by hand: each fires on its fault, is silent on a healthy twin, and survives what a killed rank leaves."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import builder
import pytest
from builder import event, recording, row, site

from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.checks.dat.batch_sampler import BatchSamplerNotSharded
from harness.checks.dat.coverage import ShardsDoNotCover
from harness.checks.dat.epoch_not_set import EpochNotSet
from harness.checks.dat.first_batch import FirstBatchAgain
from harness.checks.dat.iterable import IterableNotSharded
from harness.checks.dat.names_differ import NamesNumberedApart
from harness.checks.dat.noise_repeats import NoiseRepeats
from harness.checks.dat.not_sharded import NotSharded
from harness.checks.dat.order_differs import SampleOrderDiffers
from harness.checks.dat.other_set import SamplerOfAnotherSet
from harness.checks.dat.own_scale import OwnScale
from harness.checks.dat.rank_identical_rng import RankIdenticalRng
from harness.checks.dat.resume import ShuffleRestarts
from harness.checks.dat.seed_differs import SeedDiffers
from harness.checks.dat.skipped_again import SkippedAgain
from harness.checks.dat.split_differs import SplitDiffers
from harness.checks.dat.stride_other import StrideNotWorldSize
from harness.checks.dat.uneven import UnevenInputs
from harness.checks.dat.worker_rng import WorkerRngIdentical
from harness.checks.dat.workers_keep_epoch import WorkersKeepEpoch
from harness.checks.dat.wrong_world import WrongWorld
from harness.model import Finding, RankStacks, Severity, Where
from harness.probe import protocol
from harness.record import Event, Recording, Run

ALL: list[type[Check]] = [
    BatchSamplerNotSharded, EpochNotSet, FirstBatchAgain, IterableNotSharded, NotSharded, OwnScale, RankIdenticalRng, SampleOrderDiffers, SamplerOfAnotherSet, SeedDiffers,
    ShardsDoNotCover, ShuffleRestarts, SplitDiffers, StrideNotWorldSize, UnevenInputs, WorkerRngIdentical, WorkersKeepEpoch, WrongWorld,
]  # fmt: skip


OF_PASSES = ("first_trained", "own", "worker_random", "worker_seeds", "worker_own", "shapes")


def packed(values: list[int]) -> str:
    return base64.b64encode(zlib.compress(struct.pack(f"<{len(values)}I", *values))).decode() if values else ""


def crc(values: list[int]) -> int:
    return zlib.crc32(repr(values).encode()) or 1


def one_pass(
    loop: int, indices: list[int], *, rows: list[int] | None = None, line: int = 40, closed: bool = True, **fields: Any
) -> list[Event]:
    """A "loader" and a "pass" event; fields of either may be given."""
    rows = [1000 + i for i in indices] if rows is None else rows
    opened = {
        "loop": loop, "loader": 0, "made": site(20, "loader = DataLoader(data)"), "made_sampler": site(18, "sampler = ..."),
        "sampler": "DistributedSampler",
        "batch_sampler": "BatchSampler", "dataset": "Data", "dataset_id": 0, "dataset_len": 64, "iterable": False, "num_workers": 0,
        "persistent": False,
        "batch_size": 4, "planned": -(-len(indices) // 4), "epochs": {},
    }  # fmt: skip
    ended = {
        "loop": loop, "loader": 0, "num_batches": -(-len(rows) // 4), "num_samples": len(rows), "order": crc(indices),
        "indices": packed(indices), "rows": packed(rows),
        "labels": "", "content": crc(rows), "batch_sizes": [4, 4, 4], "backwards": 1, "collectives": 0, "steps": 4, "complete": True,
        "grad": True, "training": True, "let_go": False,
    }  # fmt: skip
    first, last = (
        {k: v for k, v in fields.items() if k not in ended},
        {k: v for k, v in fields.items() if k in ended or k in OF_PASSES},
    )
    s, y = fields.get("s", 0), fields.get("y", 0)
    begin = event(
        "loader", line=line, **(opened | {k: v for k, v in first.items() if k not in ("s", "y", *OF_PASSES)}), s=s, y=y
    )
    return [begin, event("pass", line=line, **(ended | last), s=s, y=y)] if closed else [begin]


def ddp(world: int = 2) -> Event:
    return event("wrap", index=0, group_size=world)


def shuffled(rank: int, epoch: int = 0, world: int = 2, **told: Any) -> dict[str, Any]:
    return {
        "distributed": {
            "num_replicas": world,
            "rank": rank,
            "epoch": epoch,
            "seed": 0,
            "shuffle": True,
            "total_size": 64,
            "num_samples": 32,
            **told,
        }
    }


def share(rank: int, epoch: int = 0, num: int = 64) -> list[int]:
    """A rank's share of a permutation of its own for each epoch."""
    return [(i * 29 + 7 * epoch) % num for i in range(num)][rank::2]


def two(*events: list[Event], rows: tuple[list[bytes], list[bytes]] = ([], []), **how: Any) -> Run:
    recordings = [recording([ddp(), *own], rows[rank], rank=rank) for rank, own in enumerate(events)]
    return builder.run(recordings, **how)


def said(check: type[Check], run: Run) -> Finding:
    found = builder.findings(check, run)
    assert len(found) == 1 and found[0].code == check.code
    return found[0]


def silent(check: type[Check], run: Run) -> None:
    assert builder.findings(check, run) == []


def healthy(epochs: int = 2) -> Run:
    return two(*([e for epoch in range(epochs) for e in one_pass(epoch, share(rank, epoch), **shuffled(rank, epoch))] for rank in range(2)))


@pytest.mark.parametrize("check", ALL)
def test_silent_on_a_healthy_run(check: type[Check]) -> None:
    silent(check, healthy())


@pytest.mark.parametrize("check", ALL)
def test_nothing_recorded_is_no_crash(check: type[Check]) -> None:
    silent(check, builder.run([]))
    silent(check, builder.run([Recording("0-1-1"), Recording("0-2-1")], nproc=2))
    silent(check, builder.run([recording([ddp()], [row(0)[:100]], rank=0)], nproc=2))


@pytest.mark.parametrize("check", ALL)
def test_forged_fields_are_no_crash(check: type[Check]) -> None:
    odd: list[Any] = [None, "x", -1, [], {}, [None], 1e400]
    for value in odd:
        names = (
            "indices",
            "rows",
            "labels",
            "distributed",
            "subset",
            "planned",
            "num_batches",
            "own",
            "worker_random",
            "epochs",
            "dataset_len",
            "made",
            "batch_sizes",
            "base_seed",
            "num_workers",
            "sampler",
        )
        forged = [
            [*one_pass(n, share(0, n), **shuffled(0, n))[:1], event("pass", **{"loop": n, "backwards": 1, **dict.fromkeys(names, value)})]
            for n in range(2)
        ]
        opened = [event("loader", **{"loop": n, **dict.fromkeys(names, value)}) for n in range(2, 4)]
        closed = [event("pass", **{"loop": n, "backwards": 1, **dict.fromkeys(names, value)}) for n in range(2, 4)]
        other = [
            event(k, site=value, values=value, digest=value, exits=value, ranges=value, of="step", at=value)
            for k in ("draw", "loop", "seed")
        ]
        builder.findings(check, two(*[[e for f in forged for e in f] + opened + closed + other for _ in range(2)], exits=(1, -9)))


def test_epoch_not_set() -> None:
    run = two(*([e for n in range(3) for e in one_pass(n, share(rank), **shuffled(rank))] for rank in range(2)))
    found = said(EpochNotSet, run)
    assert found.message == "epochs 0 to 2 drew the same sample order" and found.ranks == (0, 1)
    assert found.where is not None and found.where.line == 40


def test_an_epoch_that_another_sampler_was_given() -> None:
    def run(sampler: int) -> Run:
        given = [event("set_epoch", line=33, epoch=n, sampler=sampler) for n in range(3)]
        return two(*([*given, *(e for n in range(3) for e in one_pass(n, share(rank), **shuffled(rank)))] for rank in range(2)))

    found = said(EpochNotSet, run(424_242))
    assert found.where is not None and found.where.line == 33 and "another sampler" in found.notes[1]


def test_epoch_not_set_when_loaders_are_made_anew_and_passes_are_cut() -> None:
    said(
        EpochNotSet,
        two(
            *(
                [e for n in range(2) for e in one_pass(n, share(rank)[: 12 + n], loader=n, complete=False, **shuffled(rank))]
                for rank in range(2)
            )
        ),
    )


def test_two_trainings_may_begin_alike() -> None:
    """A teacher and its student pass over the data once each, with one seed and their own optimizers."""

    def twice(opts: tuple[int, int]) -> Run:
        own = [[one_pass(n, share(rank), **shuffled(rank)) for n in range(2)] for rank in range(2)]
        steps = [[row(n, opt=opts[n], t_ns=opened.t_ns + 1) for n, (opened, _) in enumerate(passes)] for passes in own]
        return two(*([e for one in passes for e in one] for passes in own), rows=(steps[0], steps[1]))

    silent(EpochNotSet, twice((0, 1)))
    said(EpochNotSet, twice((0, 0)))


def set_epoch(epoch: int) -> Event:
    return event("set_epoch", line=50, epoch=epoch, sampler=1)


def test_epoch_set_after_its_pass() -> None:
    def late(rank: int) -> list[Event]:
        found: list[Event] = []
        for nth in range(4):
            found += [*one_pass(nth, share(rank, max(0, nth - 1)), **shuffled(rank, max(0, nth - 1), id=1)), set_epoch(nth)]
        return found

    def warm_up(rank: int) -> list[Event]:
        found = one_pass(9, share(rank), **shuffled(rank, id=1))
        for nth in range(3):
            found += [set_epoch(nth), *one_pass(nth, share(rank, nth), **shuffled(rank, nth, id=1))]
        return found

    found = said(EpochNotSet, two(late(0), late(1)))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 50
    silent(EpochNotSet, two(warm_up(0), warm_up(1)))


def test_the_whole_data_in_one_batch_needs_no_epoch() -> None:
    own = [[e for n in range(3) for e in one_pass(n, share(rank), planned=1, num_batches=1, **shuffled(rank))] for rank in range(2)]
    silent(EpochNotSet, two(*own))


def test_the_first_batch_again() -> None:
    def run(*epochs: int, text: str = "x, y = next(iter(loader))", **fields: Any) -> Run:
        told = {"num_batches": 1, "complete": False, "planned": 8, "site": site(40, text)} | fields
        return two(*([e for n, epoch in enumerate(epochs) for e in one_pass(n, share(r, epoch)[:4], **shuffled(r), **told)] for r in range(2)))

    assert said(FirstBatchAgain, run(0, 0, 0, 0, 0)).severity is Severity.ERROR
    assert said(FirstBatchAgain, run(0, 0, 0, 0, 0, let_go=True)).severity is Severity.ERROR
    silent(FirstBatchAgain, run(0, 1, 2, 3, 4))
    silent(FirstBatchAgain, run(0, 0, 0))
    pictures = [[e for n in range(5) for e in one_pass(n, share(0)[:4], let_go=True, num_batches=1, s=9 * n, planned=8)] for _ in range(2)]
    silent(FirstBatchAgain, two(*pictures))  # a look at the first samples now and then
    silent(NotSharded, two(*pictures))
    silent(FirstBatchAgain, run(0, 0, 0, 0, 0, planned=1))  # a loader of one batch
    silent(FirstBatchAgain, run(0, 0, 0, 0, 0, text="for x, y in loader:"))  # left by a break: to overfit one batch
    silent(FirstBatchAgain, run(0, 0, 0, 0, 0, rows=[7, 7, 7, 7]))  # one synthetic sample


def test_no_shuffle_is_meant() -> None:
    silent(
        EpochNotSet, two(*([e for n in range(2) for e in one_pass(n, share(rank), **shuffled(rank, shuffle=False))] for rank in range(2)))
    )


def test_a_sampler_of_the_scripts_own_with_set_epoch() -> None:
    fields = {"sampler": "Mine", "custom_sampler": True, "set_epoch": True, "distributed": None}
    said(EpochNotSet, two(*([e for n in range(2) for e in one_pass(n, share(rank), **fields)] for rank in range(2))))
    silent(EpochNotSet, two(*([e for n in range(2) for e in one_pass(n, sorted(share(rank)), **fields)] for rank in range(2))))


def plain(**more: Any) -> dict[str, Any]:
    return {"sampler": "RandomSampler", "distributed": None, **more}


def test_no_sampler() -> None:
    found = said(NotSharded, two(*([*one_pass(0, share(0), **plain())] for _ in range(2))))
    assert found.severity is Severity.ERROR and found.where is not None and found.where.line == 20


def test_ranks_that_train_alone_are_not_judged() -> None:
    silent(NotSharded, builder.run([recording(one_pass(0, share(0), **plain()), rank=r) for r in range(2)]))


def test_shards_cut_before_the_loader() -> None:
    """Equal indices into other samples: `data[rank::world]` under shuffle=True with one seed."""
    silent(NotSharded, two(*(one_pass(0, share(0), rows=[rank * 5000 + i for i in range(32)], **plain()) for rank in range(2))))


def test_a_global_batch_cut_by_rank() -> None:
    cut = [event("accumulation", opt=0, rows=2) for _ in range(3)]
    silent(NotSharded, two(*([*one_pass(0, share(0), **plain()), *cut] for _ in range(2))))


def test_the_whole_data_on_each_rank_in_its_own_order() -> None:
    orders = [list(range(64)), list(range(63, -1, -1))]
    found = said(NotSharded, two(*(one_pass(0, order, **plain()) for order in orders)))
    assert found.severity is Severity.WARNING and "all 64 samples" in found.message


def test_augmented_samples_are_known_by_what_the_data_sets_keep() -> None:
    def run(kept: tuple[int, int], length: int = 64) -> Run:
        own = []
        for rank in range(2):
            told = event("dataset", line=40, loop=0, loader=0, kind="Data", attributes={"files": [kept[rank], 1, length, site(12)]})
            epochs = [(0, list(range(64))), (1, list(range(63, -1, -1)))] if rank else [(0, list(range(63, -1, -1))), (1, list(range(64)))]
            drawn = [e for n, order in epochs for e in one_pass(n, order, rows=[5000 * (2 * rank + n) + i for i in range(64)], **plain())]
            own.append([told, *drawn])
        return two(*own)

    assert said(NotSharded, run((7, 7))).severity is Severity.WARNING
    silent(NotSharded, run((7, 8)))  # shards that were cut before the loader
    silent(NotSharded, run((7, 7), length=128))  # a list of all files, of which each rank takes a part by its own arithmetic


def test_sampling_with_replacement_is_meant() -> None:
    orders = [list(range(64)), list(range(63, -1, -1))]
    silent(NotSharded, two(*(one_pass(0, order, **plain(replacement=True)) for order in orders)))


def steps(batches: list[int], losses: list[float]) -> list[bytes]:
    return [row(i, batch=b, loss=v, param=5, num_coll=1) for i, (b, v) in enumerate(zip(batches, losses, strict=True))]


def aims(*columns: list[int], varied: bool = True, numel: int = 96, shares: int = 1, noise: bool = False) -> Run:
    told = [
        event("loss_targets", line=71, digests=packed(c), numel=numel, varied=varied, shares=[site(25 + n) for n in range(shares)], noise=noise)
        for c in columns
    ]
    rows = [steps([11 + r, 21 + r, 31 + r], [0.5 + r, 0.4, 0.3]) for r in range(2)]
    return two([told[0]], [told[1]], rows=(rows[0], rows[1]))


def test_equal_targets_under_noise_of_the_ranks_own() -> None:
    found = said(NotSharded, aims([*range(1, 17)], [*range(1, 15)]))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 25
    found = said(NotSharded, aims([*range(1, 17)], [*range(1, 17)], shares=2))
    assert found.where is None or found.where.line != 25


@pytest.mark.parametrize(
    "healthy",
    [
        aims([*range(1, 17)], [*range(2, 18)]),
        aims([5] * 16, [5] * 16),  # one target for ever: an image that is fitted, a boundary
        aims([1, 2] * 8, [1, 2] * 8),
        aims([*range(1, 17)], [*range(1, 17)], varied=False),  # ones and zeros of a discriminator
        aims([*range(1, 17)], [*range(1, 17)], numel=4),
        aims([*range(1, 6)], [*range(1, 6)]),
        aims([*range(1, 17)], [*range(1, 17)], noise=True),  # a denoiser: the samples may well differ
    ],
)
def test_targets_that_may_be_equal(healthy: Run) -> None:
    silent(NotSharded, healthy)


def test_targets_say_nothing_where_a_loader_deals_out() -> None:
    told = [event("loss_targets", line=71, digests=packed([*range(1, 17)]), numel=96, varied=True, shares=[]) for _ in range(2)]
    silent(NotSharded, two(*([told[r], *one_pass(0, share(r))] for r in range(2))))


def numbered(*ranks: dict[int, int], name: str = "index", shared: dict[int, int] | None = None, places: tuple[int, ...] = ()) -> Run:
    use = [{"stays": True, "places": p} for p in places] or [{"stays": False, "places": 0}] * len(ranks)
    told = [
        event("name_index", line=34, owner="Vocabulary", name=name, num=29, some=[list(p) for p in sorted(r.items())], **u)
        for r, u in zip(ranks, use, strict=True)
    ]
    beside = event("name_index", line=33, owner="Vocabulary", name="a", num=29, some=[list(p) for p in sorted((shared or {}).items())])
    return two(*([*([beside] if shared else []), one] for one in told))


def test_names_that_have_another_number_on_each_rank() -> None:
    words = {100 + n: n for n in range(8)}
    turned = {key: 7 - n for key, n in words.items()}
    found = said(NamesNumberedApart, numbered(words, turned))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 34 and "8 of 8" in found.message
    silent(NamesNumberedApart, numbered(words, words))
    silent(NamesNumberedApart, numbered(words, {500 + n: n for n in range(8)}))  # files of its own share
    silent(NamesNumberedApart, numbered(words, words | {100: 1, 101: 0, 900: 8}))  # two of eight
    silent(NamesNumberedApart, numbered(words, turned, shared=words))  # that one encodes: this is an order of the rank's own
    silent(NamesNumberedApart, numbered(words, turned, places=(0, 0)))  # compared, sorted by
    silent(NamesNumberedApart, numbered(words, turned, places=(7, 8)))  # rows of a cache that has another order on each rank
    said(NamesNumberedApart, numbered(words, turned, places=(7, 7)))  # rows of one table, another one for each rank
    said(NamesNumberedApart, numbered(words, turned, shared={300 + n: n for n in range(8)}))


def test_equal_noise_for_different_samples() -> None:
    """What a denoiser has to find is drawn alike on all ranks: another mistake."""
    drawn = [
        event("draw", line=60, fn="randn", at=n, num=1, numel=96, rows=32, digest=50 + n, whole=True, generator=False, data=False, grad=True)
        for n in range(6)
    ]
    rows = tuple(steps([11 + r, 21 + r, 31 + r], [0.5 + r, 0.4, 0.3]) for r in range(2))
    silent(NotSharded, two(*([*r.events, *drawn] for r in aims([*range(1, 17)], [*range(1, 17)]).present), rows=rows))


def test_equal_batches_by_hand() -> None:
    rows = steps([11, 12, 13], [0.5, 0.4, 0.3])
    assert said(NotSharded, two([], [], rows=(rows, rows))).severity is Severity.ERROR
    same = steps([11, 11, 11], [0.5, 0.5, 0.5])
    assert said(NotSharded, two([], [], rows=(same, same))).severity is Severity.ADVICE
    silent(NotSharded, two([], [], rows=(rows, steps([21, 22, 23], [0.5, 0.4, 0.3]))))
    silent(NotSharded, two([], [], rows=(rows, steps([11, 12, 13], [0.5, 0.4, 0.2]))))
    silent(NotSharded, two([], [], rows=(rows[:2], rows[:2])))


def fed(batches: list[int]) -> list[Event]:
    halves = (batches[:9], batches[9:])
    return [event("fed", line=60, index=0, first=9 * i, digests=packed(half), made=site(30, "position += B * T")) for i, half in enumerate(halves)]


def test_a_rank_that_follows_another() -> None:
    found = said(NotSharded, two(fed(list(range(20))), fed(list(range(1, 21)))))
    assert "rank 0 trains on the batches that rank 1 had 1 batch before" in found.message
    assert found.where is not None and found.where.line == 30
    four = builder.run([recording([ddp(4), *fed([2 * i + rank for i in range(20)])], rank=rank) for rank in range(4)])
    assert "rank 0 trains on the batches that rank 2 had" in said(NotSharded, four).message


def test_healthy_ways_through_the_data() -> None:
    def own(first: list[int], second: list[int]) -> Run:
        return two(fed(first), fed(second))

    silent(NotSharded, own(list(range(0, 40, 2)), list(range(1, 41, 2))))
    half, rest = list(range(10)), list(range(10, 20))
    silent(NotSharded, own(half + rest, rest + half))  # shares that the ranks exchange, or a pass begun elsewhere
    silent(NotSharded, own([5] * 20, [5] * 20))  # one batch for ever
    silent(NotSharded, own([(7 * i * i) % 11 for i in range(20)], [(5 * i * i + 1) % 11 for i in range(20)]))  # with replacement
    silent(NotSharded, own(list(range(6)), list(range(1, 7))))  # too few to tell


def test_equal_batches_by_hand_without_ddp() -> None:
    rows = steps([0, 0, 0], [0.5, 0.4, 0.3])

    def synced(*gradients: float) -> Run:
        events = [
            [event("initial", opt=0, each=[1, 2]), *(event("gradients", opt=0, local={"0": [g + i]}) for i in range(2))] for g in gradients
        ]
        return builder.run([recording(e, rows, rank=r) for r, e in enumerate(events)])

    said(NotSharded, synced(0.1, 0.1))
    silent(NotSharded, synced(0.1, 0.2))  # the loss was reduced before backward


def test_seed_and_epoch_differ() -> None:
    seeds = two(*(one_pass(0, share(rank, rank), **shuffled(rank, seed=rank)) for rank in range(2)))
    assert "seed differs" in said(SeedDiffers, seeds).message
    epochs = two(*(one_pass(0, share(rank, rank), **shuffled(rank, epoch=rank)) for rank in range(2)))
    assert "epoch differs" in said(SeedDiffers, epochs).message


def test_a_global_batch_that_is_cut_by_rank() -> None:
    def run(rows: int) -> Run:
        return two(*([*one_pass(0, share(0), batch_size=8, **shuffled(0, world=1)), event("accumulation", opt=0, rows=rows)] for _ in range(2)))

    silent(WrongWorld, run(4))
    said(WrongWorld, run(8))


def test_wrong_world() -> None:
    found = said(WrongWorld, two(*(one_pass(0, share(0), **shuffled(0, world=1)) for _ in range(2))))
    assert found.where is not None and found.where.line == 18 and "1 replicas" in found.message
    said(WrongWorld, two(*(one_pass(0, share(0), **shuffled(0)) for _ in range(2))))


@pytest.mark.parametrize("world", [1, 3])
def test_a_sampler_of_the_group_that_the_rank_is_in_when_the_pass_begins(world: int) -> None:
    """Rank 0 goes on alone."""
    groups = [event("pg", done=True, rank=0, world_size=2), event("pg", done=True, rank=0, world_size=1)]
    alone = [groups[0], *one_pass(0, share(0), **shuffled(0)), groups[1], *one_pass(1, share(0), **shuffled(0, world=world))]
    run = two(alone, [event("pg", done=True, rank=1, world_size=2), *one_pass(0, share(1), **shuffled(1))])
    for at, one in enumerate(run.ranks[0].events[1:]):  # type: ignore[union-attr]
        object.__setattr__(one, "t_ns", 1000 + at)
    assert (builder.findings(WrongWorld, run) == []) == (world == 1)


def test_more_virtual_shards_than_ranks() -> None:
    run = two(*([e for n in range(2) for e in one_pass(n, share(rank, n), **shuffled(2 * rank + n, world=4))] for rank in range(2)))
    silent(WrongWorld, run)


def own_records(world: int, rank: int, far: int = 1000, labels: bool = False) -> list[Event]:
    """Three epochs over records that each rank holds for itself (or not: far=0)."""
    found: list[Event] = []
    for epoch in range(3):
        drawn = share((rank + epoch) % 2) if world == 2 else share(0) + share(1)
        rows = [100 + i + far * rank for i in drawn]
        told = shuffled(rank if world == 2 else 0, epoch, world)
        found += one_pass(epoch, drawn, rows=rows, labels=packed([(i + rank) % 3 for i in drawn]) if labels else "", **told)
    return found


@pytest.mark.parametrize("labels", [False, True])
def test_a_sampler_of_one_replica_over_shares_of_the_ranks(labels: bool) -> None:
    run = two(own_records(1, 0, labels=labels), own_records(1, 1, labels=labels))
    silent(WrongWorld, run)
    silent(SampleOrderDiffers, run)
    said(WrongWorld, two(own_records(1, 0, far=0), own_records(1, 1, far=0)))


def test_sharded_twice() -> None:
    run = two(own_records(2, 0), own_records(2, 1))
    found = said(WrongWorld, run)
    assert "sharded twice" in found.message and found.severity is Severity.WARNING and "32 of its 64" in found.notes[0]
    silent(SampleOrderDiffers, run)


def rated(rank: int, far: int, *, moved: int = 0, noisy: bool = False, line: str = "records = records[rank::world]") -> list[Event]:
    """Ratings, told apart by user and stars together: ten users have them all. `moved`: the same ones in an order of the rank's own."""
    found: list[Event] = []
    for epoch in range(3):
        drawn = share((rank + epoch) % 2)
        held = [(i + moved * rank) % 64 + far * rank for i in drawn]
        stars = packed([7000 + k + 500 * epoch * noisy for k in held])
        found += one_pass(epoch, drawn, rows=[i % 10 for i in held], labels=stars, made_dataset=[site(47), site(46, line)], **shuffled(rank, epoch))
    return found


def test_shares_told_apart_by_sample_and_label_together() -> None:
    run = two(rated(0, 1003), rated(1, 1003))
    found = said(WrongWorld, run)
    assert "sharded twice" in found.message and found.severity is Severity.ERROR and found.where is not None and found.where.line == 46
    silent(SampleOrderDiffers, run)
    later = said(WrongWorld, two(*(rated(r, 1003, line="records = load(path[rank])") for r in range(2))))
    assert later.severity is Severity.WARNING and later.where is not None and later.where.line == 18
    silent(WrongWorld, two(rated(0, 0), rated(1, 0)))  # one set
    silent(WrongWorld, two(rated(0, 0, moved=13), rated(1, 0, moved=13)))  # one set in another order: DAT110
    said(SampleOrderDiffers, two(rated(0, 0, moved=13), rated(1, 0, moved=13)))
    silent(WrongWorld, two(rated(0, 1003, noisy=True), rated(1, 1003, noisy=True)))  # labels drawn anew each time tell nothing


def test_weighted_draws_keep_their_weights() -> None:
    told = plain(sampler="WeightedRandomSampler", replacement=True)
    assert "generator seeded with seed + rank" in said(NotSharded, two(*(one_pass(0, share(0), **told) for _ in range(2)))).help
    assert "DistributedSampler(dataset)" in said(NotSharded, two(*(one_pass(0, share(0), **plain()) for _ in range(2)))).help


@pytest.mark.parametrize(("drawn", "fires"), [(([2048, 64, 5], [2048, 64, 6]), False), (([9, 64, 5], [9, 64, 5]), True), (([3, 12, 5], [3, 12, 6]), True)])
def test_toy_data_that_each_rank_made_at_random_was_not_sharded_before(drawn: tuple[list[int], ...], fires: bool) -> None:
    """The same draws on all ranks made one set, which was then cut; a few other draws made no data."""
    made = [event("dataset", kind="Data", attributes={}, drawn=drawn[rank]) for rank in range(2)]
    run = two(*([made[rank], *own_records(2, rank)] for rank in range(2)))
    if fires:
        assert "sharded twice" in said(WrongWorld, run).message
    else:
        silent(WrongWorld, run)


def test_a_sampler_of_one_replica_over_augmented_shares() -> None:
    def own(rank: int, bag: int) -> list[Event]:
        keys = event("dataset", kind="Data", attributes={"keys": [rank, bag, 64, site(8)]})
        return [keys, *(e for n in range(2) for e in one_pass(n, share(0), rows=[99 * n + i for i in range(32)], **shuffled(0, n, 1)))]

    silent(WrongWorld, two(own(0, 1), own(1, 2)))
    said(WrongWorld, two(own(0, 1), own(1, 1)))


def subset(indices: list[int], base: int = 0) -> dict[str, Any]:
    return {"num": len(indices), "set": crc(sorted(indices)), "order": crc(indices), "of": 64, "base": base, "indices": packed(indices)}


def test_split_differs_under_a_sampler() -> None:
    sets = [list(range(48)), list(range(16, 64))]
    run = two(*(one_pass(0, share(rank, num=48), **shuffled(rank), subset=subset(sets[rank])) for rank in range(2)))
    assert "another one on each rank" in said(SplitDiffers, run).message


def measured(loop: int, indices: list[int], **fields: Any) -> list[Event]:
    return one_pass(loop, indices, line=50, backwards=0, grad=False, training=False, **fields)


def test_split_leaks() -> None:
    train, held = [list(range(48)), list(range(16, 64))], [list(range(48, 64)), list(range(16))]
    leak = [[*one_pass(0, train[r], **plain()), *measured(1, held[r], **plain())] for r in range(2)]
    found = said(SplitDiffers, two(*leak))
    assert "16 of the 16 samples" in found.message
    same = [[*one_pass(0, train[0][r::2], **plain()), *measured(1, held[0], **plain())] for r in range(2)]
    silent(SplitDiffers, two(*same))
    trained = [[*one_pass(0, train[r], **plain()), *measured(1, train[r], **plain())] for r in range(2)]
    silent(SplitDiffers, two(*trained))  # a script that measures on what it trains on


def test_batch_sampler() -> None:
    fields = {"sampler": "SequentialSampler", "batch_sampler": "Buckets", "custom_batch_sampler": True, "distributed": None}
    assert "Buckets" in said(BatchSamplerNotSharded, two(*(one_pass(0, share(0), **fields) for _ in range(2)))).message
    silent(NotSharded, two(*(one_pass(0, share(0), **fields) for _ in range(2))))
    silent(BatchSamplerNotSharded, two(*(one_pass(0, share(rank), **fields) for rank in range(2))))


def stream(rank: int, rows: list[int], **fields: Any) -> list[Event]:
    return one_pass(0, [], rows=rows, iterable=True, dataset="Stream", dataset_len=-1, planned=None, **plain(**fields))


def test_stream() -> None:
    rows = list(range(100, 132))
    assert "on all ranks" in said(IterableNotSharded, two(*(stream(r, rows) for r in range(2)))).message
    silent(IterableNotSharded, two(*(stream(r, rows[r::2]) for r in range(2))))
    twice = two(*(stream(r, [v for v in rows[r::2] for _ in range(2)], num_workers=2) for r in range(2)))
    assert "2 workers" in said(IterableNotSharded, twice).message


def test_a_stream_whose_workers_have_no_process_group() -> None:
    rows = list(range(100, 132))
    told = event("dataset", loop=0, kind="Stream", worker_group=site(50, "if dist.is_initialized():"))
    found = said(IterableNotSharded, two(*([*stream(r, rows, num_workers=1), told] for r in range(2))))
    assert found.where is not None and found.where.line == 50 and "not forked" in found.message
    silent(IterableNotSharded, two(*([*stream(r, rows[r::2], num_workers=1), told] for r in range(2))))  # the shares are others all the same


def by_workers(shares: list[list[list[int]]], *, summed: bool = True, **fields: Any) -> Run:
    """Streams of two ranks with two workers each, whose batches come in turn."""
    told = []
    for rank, (one, other) in enumerate(shares):
        rows = [v for at in range(0, len(one), 4) for v in (*one[at : at + 4], *other[at : at + 4])]
        fed = {"num_workers": 2, "num_batches": -(-len(one) // 4) + -(-len(other) // 4), "batch_sizes": [4, 4, len(one) % 4 or 4]}
        at = site(30, "me = self.rank + info.id") if summed else None
        told.append([*stream(rank, rows, **(fed | fields)), event("dataset", loop=0, kind="Stream", reader_sum=at)])
    return two(*told)


@pytest.mark.parametrize("num", [20, 22])
def test_a_stream_that_adds_rank_and_worker(num: int) -> None:
    a, b, c, d = ([100 * k + (i * i) % 83 for i in range(num)] for k in range(1, 5))
    found = said(IterableNotSharded, by_workers([[a, b], [b, c]]))
    assert found.severity is Severity.ERROR and found.where is not None and found.where.line == 30 and f"{num} samples" in found.message
    said(IterableNotSharded, by_workers([[a, b], [b[::-1], c]]))  # shuffled within, by each worker
    silent(IterableNotSharded, by_workers([[a, b], [c, d]]))  # a sum that seeds noise, say
    for other in ([[a, b], [b, c]], [[a, b], [c, a]], [[a, b], [b, b]]):  # no sum; the last reader is given a share again, to be as long as the others
        every = builder.findings(IterableNotSharded, by_workers(other, summed=other[1] != [b, c]))
        assert not [f for f in every if "duplicate" in f.message]
    thin = [[v % 3 + 100 * k for v in range(8)] for k in range(3)]
    silent(IterableNotSharded, by_workers([thin[:2], thin[1:]]))  # too few to be told apart


def test_a_sum_that_numbers_the_readers_of_a_stream_without_end() -> None:
    """The pass is left by the loop: its batches come from the workers in turn all the same."""
    a, b, c = ([100 * k + (i * i) % 83 for i in range(20)] for k in range(1, 4))
    found = said(IterableNotSharded, by_workers([[a, b], [b, c]], complete=False))
    assert found.severity is Severity.ERROR and "20 samples of worker 0 of rank 1" in found.message and found.notes[0] == "4 readers have 3 different numbers"
    unnamed = said(IterableNotSharded, by_workers([[a, b], [b, c]], summed=False, complete=False))  # no such sum stands in the source
    assert unnamed.severity is Severity.WARNING and "rank * num_workers + worker.id" in unnamed.help
    mixed = said(IterableNotSharded, by_workers([[a, b], [c, a]], summed=False, complete=False))
    assert "shuffle with a generator" in mixed.help  # by no sum
    odd = by_workers([[a[:18], b[:18]], [b[:18], c[:18]]], complete=False)
    assert "overlap" in said(IterableNotSharded, odd).message  # a batch that is not whole: a worker may have come to its end


def test_a_stride_that_forgets_the_workers() -> None:
    a, b, c, d = ([100 * k + (i * i) % 83 for i in range(24)] for k in range(1, 5))
    shifted = by_workers([[a, b], [[*a[1:], 901], [*b[1:], 902]]], summed=False)
    found = said(IterableNotSharded, shifted)
    assert found.severity is Severity.WARNING and "23 of the 24 samples of worker 0 of rank 0 are read by worker 0 of rank 1 too" in found.message
    assert "num_workers" in found.help and "4 readers" in found.notes[0]
    mixed = said(IterableNotSharded, by_workers([[a, b], [b[:12] + c[:12], a[:12] + d[:12]]], summed=False))  # ranks that shuffle apart
    assert "overlap" in mixed.message
    few = [[v % 5 + 100 * k for v in range(k, 64 + k)] for k in range(2)]
    silent(IterableNotSharded, by_workers([few, few[::-1]], summed=False))  # five kinds of sample: alike in any case


def test_workers_that_read_the_same_of_samples_that_repeat() -> None:
    a, b, c, d = ([(7 * i * i) % 31 + 100 * (i % 2 + k) for i in range(64)] for k in range(4))  # most come twice and more
    assert "2 workers of a rank repeat" in said(IterableNotSharded, by_workers([[a, a], [b, b]], summed=False)).message
    silent(IterableNotSharded, by_workers([[a, b], [c, d]], summed=False))
    silent(IterableNotSharded, by_workers([[a, a[::-1]], [b, b]], summed=False))  # as many of each, and one of them on another way
    few = [[v % 5 + 100 * k for v in range(64)] for k in range(2)]
    silent(IterableNotSharded, by_workers([[few[0], few[0]], [few[1], few[1]]], summed=False))  # five kinds of sample: alike in any case


def test_workers_that_give_classes_in_turn() -> None:
    turns = [[v % 20 + 100 * k for v in range(64)] for k in range(2)]
    assert said(IterableNotSharded, by_workers([[turns[0], turns[0]], [turns[1], turns[1]]], summed=False)).severity is Severity.ADVICE


def test_a_stream_of_ids_that_look_the_same() -> None:
    ids = [(7 * i * i) % 11 + 100 * (i % 2) for i in range(64)]  # 12 different ones: too few to tell samples apart
    falls = [row(i, loss=1 / (i + 1)) for i in range(8)]

    def run(second: list[int], other: list[bytes]) -> Run:
        return two(stream(0, ids), stream(1, second), rows=(falls, other))

    assert "64 of 64 are equal" in said(IterableNotSharded, run(ids, falls)).message
    for second, other in ((ids, [row(i, loss=1.1 / (i + 1)) for i in range(8)]), (ids[1:] + ids[:1], falls)):  # a cycle of ids; equal by chance
        with pytest.raises(Inconclusive, match="told apart"):
            list(IterableNotSharded().end(run(second, other)))


def test_another_stride() -> None:
    def run(*steps: int | None, written: bool = False) -> Run:
        own = []
        for rank, step in enumerate(steps):
            strided = None if step is None else {"step": step, "written": written, "site": site(12, "self.files = files[rank::n]")}
            own.append([event("dataset", kind="Data", loader=0, attributes={}, strided=strided), *one_pass(0, share(rank))])
        return two(*own)

    assert "overlap" in said(StrideNotWorldSize, run(1, 1)).notes[0]
    assert "no rank" in said(StrideNotWorldSize, run(4, 4)).notes[0]
    assert said(StrideNotWorldSize, run(4, 4)).severity is Severity.WARNING  # counted from devices
    assert said(StrideNotWorldSize, run(4, 4, written=True)).severity is Severity.ADVICE  # a part of the data, on purpose
    assert said(StrideNotWorldSize, run(1, 1, written=True)).severity is Severity.WARNING
    silent(StrideNotWorldSize, run(None, None))
    silent(StrideNotWorldSize, run(4, None))


def test_workers_keep_epoch() -> None:
    fields = {"persistent": True, "num_workers": 2}

    def run(second: int) -> Run:
        again = {"rows": [second + i for i in range(16)], "iterable": True, "dataset": "Stream", "dataset_len": -1, "planned": None}
        own = [
            [*stream(r, list(range(16)), epochs={"epoch": 0}, **fields), *one_pass(1, [], epochs={"epoch": 1}, **again, **plain(**fields))]
            for r in range(2)
        ]
        return two(*own)

    found = said(WorkersKeepEpoch, run(0))
    assert "epoch went from 0 to 1" in found.message
    silent(WorkersKeepEpoch, run(500))


def test_workers_keep_what_they_read() -> None:
    fields = {"persistent": True, "num_workers": 2}

    def run(second: int, **told: Any) -> Run:
        copy = {"name": "max_len", "then": "4", "now": "8", "read": site(30, "rng.randint(2, self.max_len)"), "firm": True} | told
        own = [
            [*one_pass(0, share(r), copies=[], **fields), *one_pass(1, share(r), rows=[second + i for i in share(r)], copies=[copy], **fields)]
            for r in range(2)
        ]
        return two(*own)

    found = said(WorkersKeepEpoch, run(1000))
    assert found.severity is Severity.ERROR and "max_len went from 4 to 8" in found.message and "line 30" in found.notes[1]
    assert said(WorkersKeepEpoch, run(5000)).severity is Severity.WARNING  # random crops of another size each time
    with pytest.raises(NotApplicable):
        list(WorkersKeepEpoch().end(run(1000, firm=False)))


def draws(digests: list[int], **fields: Any) -> list[Event]:
    told = {"fn": "randn", "num": 1, "numel": 16, "rows": 4, "whole": True, "generator": False, "data": False, "grad": True} | fields
    return [event("draw", line=60, at=i + 1, digest=d, **told) for i, d in enumerate(digests)]


def noisy(own: list[int], other: list[int], fed: int = 4, **fields: Any) -> Run:
    seeded = [event("seed", line=5, what="torch", value=0), event("accumulation", opt=0, rows=fed)]
    return two([*seeded, *draws(own, **fields)], [*seeded, *draws(other, **fields)])


def test_equal_noise() -> None:
    found = said(RankIdenticalRng, noisy([1, 2, 3, 4], [1, 2, 3, 4]))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 5
    silent(RankIdenticalRng, noisy([1, 2, 3, 4], [5, 6, 7, 8]))
    silent(RankIdenticalRng, noisy([1, 2], [1, 2]))


def test_draws_that_ranks_may_share() -> None:
    silent(RankIdenticalRng, noisy([1, 2, 3], [1, 2, 3], rows=0, numel=1))  # one decision for all
    silent(RankIdenticalRng, noisy([1, 2, 3], [1, 2, 3], rows=8, numel=8, fn="randint", whole=False))  # a global batch, cut by rank
    silent(RankIdenticalRng, noisy([1, 2, 3], [1, 2, 3], grad=False))  # samples drawn to be looked at


def test_equal_augmentation() -> None:
    said(RankIdenticalRng, noisy([1, 2, 3], [1, 2, 3], rows=0, numel=4, num=4, data=True, fn="random"))


def test_dropout_alone_is_advice() -> None:
    rows = [row(i, rng=100 + i) for i in range(5)]
    layers = [event("layers", opt=0, dropout=1, batchnorm=0), event("seed", line=5, what="torch", value=0)]
    assert said(RankIdenticalRng, two(layers, layers, rows=(rows, rows))).severity is Severity.ADVICE
    silent(RankIdenticalRng, two(layers, layers, rows=(rows, [row(i, rng=200 + i) for i in range(5)])))


def put_back(own: list[int], other: list[int], *, states: tuple[int, int] = (5, 5), before: tuple[int, int] = (1, 2), **fields: Any) -> Run:
    """Draws of two ranks that put a random state back after four steps."""
    ranks = zip((own, other), states, before, strict=True)
    told = [
        [
            event("accumulation", opt=0, rows=4),
            event("rng_restored", s=4, line=57, what="torch", before=was, state=now),
            *[replace(e, data={**e.data, "at": n}) for n, e in enumerate(draws(digests, **fields))],
        ]
        for digests, now, was in ranks
    ]
    return two(*told)


def test_one_random_state_put_back_on_all_ranks() -> None:
    own, other = [1, 2, 3, 4, 90, 91, 92, 93, 94], [5, 6, 7, 8, 90, 91, 92, 93, 94]
    found = said(RankIdenticalRng, put_back(own, other))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 57 and "at step 4" in found.message
    silent(RankIdenticalRng, put_back(own, [5, 6, 7, 8, 80, 81, 82, 83, 84], states=(5, 6)))  # each rank its own
    silent(RankIdenticalRng, put_back(own, [5, 6, 7, 8, 80, 81, 82, 83, 84]))  # lent for a draw in common, or seeded by rank right after
    silent(RankIdenticalRng, put_back(own, other, rows=8, numel=8))  # a global batch, cut by rank
    silent(RankIdenticalRng, put_back(own, other, rows=0, numel=1))  # one decision for all
    silent(RankIdenticalRng, put_back(own, other, generator=True))  # not drawn from what was put back
    silent(RankIdenticalRng, put_back([1, 2, 3, 4, 90, 90, 90, 90, 90], [5, 6, 7, 8, 90, 90, 90, 90, 90]))


def test_one_random_state_put_back_and_dropout() -> None:
    def run(*later: int, before: tuple[int, int] = (1, 2), at: int = 4, every: int = 1) -> Run:
        seen = [n for n in range(at + 6) if n >= at or n % every == 0]
        rows = [[row(n, rng=((100 * (r + 1) if n < at else later[r]) + n) if n in seen else 0) for n in range(at + 6)] for r in range(2)]
        told = [
            [event("layers", opt=0, dropout=1, batchnorm=0), event("rng_restored", s=at, line=57, what="torch", before=before[r], state=5)]
            for r in range(2)
        ]
        return two(*told, rows=(rows[0], rows[1]))

    assert said(RankIdenticalRng, run(500, 500)).severity is Severity.WARNING
    silent(RankIdenticalRng, run(500, 600))  # a state of each rank's own follows
    silent(RankIdenticalRng, run(500, 500, before=(1, 1)))
    assert "step 120" in said(RankIdenticalRng, run(500, 500, at=120, every=16)).message  # states are kept at few of the later steps
    silent(RankIdenticalRng, run(500, 600, at=120, every=16))


def test_worker_seeds() -> None:
    def run(*seeds: int, moved: int = 1) -> Run:
        own = (one_pass(0, share(r), **shuffled(r), num_workers=2, base_seed=seeds[r], worker_random=[moved, 0, 0, 0]) for r in range(2))
        return two(*own)

    said(WorkerRngIdentical, run(7, 7))
    silent(WorkerRngIdentical, run(7, 8))
    silent(WorkerRngIdentical, run(7, 7, moved=0))


def test_workers_seeded_alike_by_their_init_function() -> None:
    def run(*seeds: list[list[int]], moved: tuple[int, ...] = (0, 0, 1, 0), base: int = 1) -> Run:
        told = {"num_workers": 2, "worker_random": list(moved), "seeds_workers": site(27, "np.random.seed(worker_id)")}
        own = (
            [e for n in range(2) for e in one_pass(n, share(r, n), **shuffled(r, n), base_seed=70 + base * r, worker_seeds=seeds[r], **told)]
            for r in range(2)
        )
        return two(*own)

    found = said(WorkerRngIdentical, run([[1, 2, 9], [3, 4, 8]], [[5, 6, 9], [7, 8, 8]]))
    assert found.message.startswith("numpy's") and found.where is not None and found.where.line == 27 and "same draws" in found.notes[0]
    silent(WorkerRngIdentical, run([[1, 2, 9], [3, 4, 8]], [[5, 6, 7], [7, 8, 6]]))
    silent(WorkerRngIdentical, run([[1, 2, 9], [3, 4, 8]], [[5, 6, 9], [7, 8, 8]], moved=(1, 0, 0, 0)))  # seeded alike, never drawn from
    silent(WorkerRngIdentical, run([[1, 2, 0], [3, 4, 0]], [[5, 6, 0], [7, 8, 0]]))  # the dataset seeds anew for each sample


def test_a_generator_that_is_copied_into_the_workers() -> None:
    def run(*workers: list[int], second: list[list[int]] | None = None, iterable: bool = False) -> Run:
        epochs = [list(workers), second or list(workers)]
        own = (
            [
                e
                for n, rows in enumerate(epochs)
                for e in one_pass(
                    n, share(r, n), **shuffled(r, n), num_workers=2, base_seed=70 + 9 * n + r, iterable=iterable, worker_random=[0, 0, 0, 1],
                    own=[{"rng": 7 + r}, {"rng": 7 + r}],
                    worker_own={"name": "rng", "site": site(19, "self.rng = default_rng(seed)"), "workers": [[v + 100 * r for v in w] for w in rows]},
                )
            ]
            for r in range(2)
        )  # fmt: skip
        return two(*own)

    found = said(WorkerRngIdentical, run([5, 6, 7], [5, 6, 8]))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 19 and "`rng`" in found.message
    assert "2 epochs are equal" in found.notes[1]
    assert len(said(WorkerRngIdentical, run([5, 6, 7], [5, 6, 8], second=[[15, 16, 17], [15, 16, 18]])).notes) == 1  # seeded by epoch alone
    silent(WorkerRngIdentical, run([5, 6, 7], [9, 10, 11]))  # worker_init_fn gave each its own
    silent(WorkerRngIdentical, run([5, 6, 7], [5, 10, 11]))  # seeded anew for each sample, by its index
    silent(WorkerRngIdentical, run([5, 6, 6], [5, 6, 6]))  # seeded with one value for each sample
    silent(WorkerRngIdentical, run([5, 6, 7]))  # one worker drew
    silent(WorkerRngIdentical, run([5, 6, 7], [5, 6, 8], second=[[15, 16, 17], [25, 26, 27]]))
    silent(WorkerRngIdentical, run([5, 6, 7], [5, 6, 8], iterable=True))


def test_a_generator_in_one_state_on_all_ranks() -> None:
    def run(*workers: list[list[int]]) -> Run:
        own = (
            one_pass(0, share(r), **shuffled(r), num_workers=2, base_seed=70 + r, worker_random=[0, 0, 0, 1], own=[{"rng": 7}, {"rng": 7}],
                     worker_own={"name": "rng", "site": site(19), "workers": workers[r]} if workers else None)
            for r in range(2)
        )  # fmt: skip
        return two(*own)

    assert "`rng` is in the same state on all ranks" in said(WorkerRngIdentical, run()).message
    assert "`rng`" in said(WorkerRngIdentical, run([[5, 6, 0], [5, 6, 0]], [[5, 6, 0], [5, 6, 0]])).message  # one fetch each
    silent(WorkerRngIdentical, run([[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]))  # worker_init_fn gave each its own
    silent(WorkerRngIdentical, run([[1, 2, 0], [4, 5, 0]], [[7, 8, 0], [10, 11, 0]]))
    silent(WorkerRngIdentical, run([[1, 2, 3], [1, 5, 6]], [[1, 8, 9], [1, 11, 12]]))  # each made its own at its first sample


def test_a_transforms_generator_that_worker_init_fn_seeds_without_the_rank() -> None:
    def run(*workers: list[list[int]], same_order: bool = False, base: int = 0, batched: bool = False) -> Run:
        own = (
            one_pass(0, share(0 if same_order else r), **shuffled(r), num_workers=2, base_seed=70 + base * r, worker_random=[0, 0, 0, 0],
                     seeds_workers=site(27, "rng.seed(info.seed)"),
                     worker_own={"name": "mask.rng", "site": site(19), "workers": workers[r], "batched": batched})
            for r in range(2)
        )  # fmt: skip
        return two(*own)

    table = [[1, 2, 3], [4, 5, 6]]
    found = said(WorkerRngIdentical, run(table, table))
    assert found.where is not None and found.where.line == 27 and "`mask.rng`" in found.message and len(found.notes) == 2
    assert len(said(WorkerRngIdentical, run(table, table, base=1)).notes) == 1  # seeded by the worker's number
    once = said(WorkerRngIdentical, run(table, table, batched=True))  # perhaps one draw a batch, that the ranks are to share
    assert found.severity is Severity.WARNING and once.severity is Severity.ADVICE and "n-th batch" in once.message and "fine for" in once.help
    silent(WorkerRngIdentical, run(table, [[7, 8, 9], [10, 11, 12]]))
    silent(WorkerRngIdentical, run(table, [[4, 5, 6], [7, 8, 9]]))  # rank + worker: only some
    silent(WorkerRngIdentical, run([[1, 2, 3], [1, 5, 6]], [[1, 8, 9], [1, 11, 12]]))  # seeded anew for each sample, by its index
    silent(WorkerRngIdentical, run([[1, 2, 2], [4, 2, 2]], [[1, 2, 2], [4, 2, 2]]))  # with one value for each sample
    silent(WorkerRngIdentical, run([[1, 2, 0], [4, 5, 0]], [[1, 2, 0], [4, 5, 0]]))  # one fetch each, or no draw in the second
    silent(WorkerRngIdentical, run(table, table, same_order=True))  # the same samples: by index they draw the same


def test_sample_order() -> None:
    mapping = [list(range(64)), list(range(63, -1, -1))]

    def run(same: bool) -> Run:
        own = []
        for rank in range(2):
            keys = [
                event(
                    "dataset", kind="Data", attributes={"keys": [1 if same else rank + 1, 9, 64, site(8, "self.keys = list(set(names))")]}
                )
            ]
            table = mapping[0 if same else rank]
            for epoch in range(2):
                drawn = share((rank + epoch) % 2)
                keys += one_pass(epoch, drawn, rows=[table[i] for i in drawn], **shuffled(rank, epoch))
            own.append(keys)
        return two(*own)

    found = said(SampleOrderDiffers, run(False))
    assert found.where is not None and found.where.line == 8
    silent(SampleOrderDiffers, run(True))


def test_labels_contradict() -> None:
    own = []
    for rank in range(2):
        events: list[Event] = []
        for epoch in range(2):
            drawn = share((rank + epoch) % 2)
            events += one_pass(epoch, drawn, labels=packed([(i + rank) % 5 for i in drawn]), **shuffled(rank, epoch))
        own.append(events)
    assert "another label" in said(SampleOrderDiffers, two(*own)).message


def test_two_samples_of_one_content_may_have_two_labels() -> None:
    own = []
    for rank in range(2):
        drawn = share(rank)
        own.append(one_pass(0, drawn, rows=[100 + (i if i > 3 else i // 2) for i in drawn], labels=packed([i % 5 for i in drawn]), **shuffled(rank, 0)))
    silent(SampleOrderDiffers, two(*own))


@pytest.mark.parametrize(("moved", "again", "contradict"), [(0, 0, False), (1, 0, True), (1, 1, False)])
def test_labels_that_change_between_epochs_are_compared_within_one(moved: int, again: int, contradict: bool) -> None:
    """Drawn with replacement, renamed with every epoch; `moved`: other classes on rank 1; `again`: another label at a rank's second draw."""
    own = []
    for rank in range(2):
        events: list[Event] = []
        for epoch in range(3):
            drawn = [(7 * k + 11 * rank + epoch) % 40 for k in range(32)]
            labels = [(i + epoch + moved * rank + again * k) % 5 for k, i in enumerate([*drawn, drawn[0]])]
            events += one_pass(epoch, [*drawn, drawn[0]], labels=packed(labels), **shuffled(rank, epoch))
        own.append(events)
    found = builder.findings(SampleOrderDiffers, two(*own))
    assert ["another label" in f.message for f in found] == ([True] if contradict else [])


def test_labels_noised_anew_by_each_rank_are_no_other_classes() -> None:
    own = []
    for rank in range(2):
        events: list[Event] = []
        for epoch in range(3):
            drawn = [(7 * k + 11 * rank + epoch) % 40 for k in range(32)]
            labels = [i % 5 + (i % 4 == (rank + epoch) % 4) for i in drawn]
            events += one_pass(epoch, drawn, labels=packed(labels), **shuffled(rank, epoch))
        own.append(events)
    silent(SampleOrderDiffers, two(*own))


def padded(*, wrong: int = 0, relabelled: bool = False) -> Run:
    """Samples that the collate function pads to the longest of their batch; from epoch to epoch a rank draws the other's, in other batches."""
    own = []
    for rank in range(2):
        events: list[Event] = []
        for epoch in range(2):
            drawn = share((rank + epoch) % 2)
            lengths = [20 + (i + epoch) % 3 if i % 8 > 1 else 20 for i in drawn]
            rows = [1000 + i * 64 + (n if not relabelled else 0) + wrong * rank for i, n in zip(drawn, lengths, strict=True)]
            labels = [i * 64 + n for i, n in zip(drawn, lengths, strict=True)]
            events += one_pass(epoch, drawn, rows=rows, labels=packed(labels), shapes=packed(lengths), **shuffled(rank, epoch))
        own.append(events)
    return two(*own)


def test_padding_makes_no_other_sample() -> None:
    silent(SampleOrderDiffers, padded())
    silent(SampleOrderDiffers, padded(relabelled=True))  # images of one size, captions that are padded
    assert "another sample" in said(SampleOrderDiffers, padded(wrong=1)).message


def loop_event(*exits: tuple[int, str, int], of: str = "loader", line: int = 40) -> Event:
    ranges = [
        {"file": "/home/u/train.py", "func": "main", "first": 40, "last": 48, "level": 0},
        {"file": "/home/u/train.py", "func": "main", "first": 38, "last": 55, "level": 1},
    ]
    return event(
        "loop", line=line, of=of, ranges=ranges, exits=[{"site": site(at), "kind": kind, "level": level} for at, kind, level in exits]
    )


def uneven(few: int = 3, **first: Any) -> list[list[Event]]:
    long = one_pass(0, list(range(20)), closed=False, **plain(planned=5))
    return [[loop_event(), *one_pass(0, list(range(4 * few)), **(plain(planned=few) | first))], [loop_event(), *long]]


def test_uneven_inputs() -> None:
    rows = [row(i, num_batches=1, t_ns=1 << 60) for i in range(3)]
    found = said(UnevenInputs, two(*uneven(), rows=(rows, rows), exits=(-9, -9), reason="hang"))
    assert found.ranks == (0,) and found.where is not None and found.where.line == 40
    silent(UnevenInputs, two(*uneven(), rows=(rows, rows)))  # ended well, as many steps: nobody was harmed
    joined = [[event("join"), *own] for own in uneven()]
    silent(UnevenInputs, two(*joined, rows=(rows, rows), exits=(-9, -9), reason="hang"))
    early = uneven(planned=5, complete=False)
    silent(UnevenInputs, two(*early, rows=(rows, rows), exits=(-9, -9), reason="hang"))  # it left by itself: EVL103


def test_a_rank_that_hangs_between_two_epochs_had_no_fewer_batches() -> None:
    """Without a loader of torch's, the loop is known by its lines: the other rank has come back to it for the next epoch."""

    def hung(op: str) -> Run:
        frames = (RankStacks(0, {"MainThread": (Where("/home/u/train.py", 45, "main"),)}), RankStacks(1, {"MainThread": (Where("/home/u/train.py", 50, "main"),)}))
        own = [
            recording([loop_event(of="step"), event("stall", phase="train", op=call, site=site(line), stack=[site(line)])],
                      [row(i) for i in range(3)], rank=rank)
            for rank, (call, line) in enumerate((("all_reduce", 45), (op, 50)))
        ]  # fmt: skip
        made = builder.run(own, exits=(-9, -9), reason="hang")
        made.ending = replace(made.ending, stacks=frames)
        return made

    said(UnevenInputs, hung("barrier"))
    silent(UnevenInputs, hung(""))


def test_local_epochs_of_unequal_length_wait_for_nobody() -> None:
    def run(seq: int) -> Run:
        own = [
            recording(
                [loop_event(), *one_pass(0, list(range(4 * n)), **plain(planned=n)), *one_pass(1, list(range(4 * n)), **plain(planned=n))],
                [row(i, num_batches=1, seq=7 + seq * i, t_ns=builder._clock[0] - 1) for i in range(n)],
                rank=rank,
            )
            for rank, n in enumerate((3, 5))
        ]
        return builder.run(own)

    silent(UnevenInputs, run(0))
    said(UnevenInputs, run(1))


def resumed(second: list[int], *, load: bool = True) -> Run:
    own = []
    for rank in range(2):
        events = [e for n in range(2) for e in one_pass(n, share(rank, n), **shuffled(rank, n))]
        events.append(event("save", path="/c.pt", done=True))
        if load:
            events.append(event("load_optimizer", kind="SGD"))
        for n, epoch in enumerate(second):
            events += one_pass(2 + n, share(rank, epoch), **shuffled(rank, epoch))
        own.append(events)
    return two(*own)


def test_resume() -> None:
    said(ShuffleRestarts, resumed([0, 1]))
    silent(ShuffleRestarts, resumed([2, 3]))
    silent(ShuffleRestarts, resumed([0, 1], load=False))  # a second training from fresh weights


def test_going_back_to_an_earlier_checkpoint_is_meant() -> None:
    own = []
    for rank in range(2):
        events = [*one_pass(0, share(rank, 0), **shuffled(rank, 0)), event("save", path="/c.pt", done=True)]
        events += [*one_pass(1, share(rank, 1), **shuffled(rank, 1)), event("load_optimizer", kind="SGD")]
        own.append(events + one_pass(2, share(rank, 1), **shuffled(rank, 1)))
    silent(ShuffleRestarts, two(*own))


def test_the_rest_of_a_finished_epoch() -> None:
    own = [
        [e for n in range(2) for e in one_pass(n, share(r, n), **shuffled(r, n))] + one_pass(2, share(r, 0)[12:], line=44, **shuffled(r, 0))
        for r in range(2)
    ]
    assert "trained on again" in said(ShuffleRestarts, two(*own)).message


def interrupted(*, trained_from: int = 1, saved_at: int = 3, loaded: str = "/c.pt", steps_before: int = 3, part: int = 12, key: str = "step") -> Run:
    """A pass that is given up after three batches, a file, a load, and a pass in the same order."""
    own = []
    for rank in range(2):
        first = one_pass(0, share(rank, 0)[:part], closed=True, complete=False, planned=8, **shuffled(rank, 0))
        saved = event("rename", s=saved_at, dst="/c.pt")
        load = [event("load", s=steps_before, path=loaded, done=True, numbers={key: 3}), event("load_optimizer", s=steps_before, kind="SGD")]
        again = one_pass(1, share(rank, 0), planned=8, first_trained=trained_from, line=71, **shuffled(rank, 0))
        own.append([*first, saved, *load, *[replace(e, step=steps_before) for e in again]])
    return two(*own)


def test_an_interrupted_epoch_that_starts_from_its_first_batch() -> None:
    found = said(ShuffleRestarts, interrupted())
    assert found.severity is Severity.WARNING and "3 batches that were trained on before the save" in found.message
    assert found.where is not None and found.where.line == 71
    silent(ShuffleRestarts, interrupted(trained_from=4))  # drawn and dropped
    silent(ShuffleRestarts, interrupted(saved_at=0))  # the file is of the epoch's start: its steps are lost, and taken again
    silent(ShuffleRestarts, interrupted(loaded="/best.pt"))
    silent(ShuffleRestarts, interrupted(part=32))  # it was complete
    silent(ShuffleRestarts, interrupted(key="lr"))  # a second stage that starts from the first one's weights


def test_shares_overlap() -> None:
    fields = {"custom_batch_sampler": True, "batch_sampler": "Buckets", "distributed": None, "sampler": "SequentialSampler"}
    overlapping = [share(0), [(i * 3) % 64 for i in range(32)]]
    found = said(ShardsDoNotCover, two(*(one_pass(0, overlapping[r], **fields) for r in range(2))))
    assert "come never" in found.message
    silent(ShardsDoNotCover, two(*(one_pass(0, share(r), **fields) for r in range(2))))


def test_shares_cut_by_hand_overlap() -> None:
    def run(start: int) -> Run:
        bounds = [range(32), range(start, start + 32)]
        return two(
            *(
                [e for n in range(2) for e in one_pass(n, list(range(32)), rows=list(bounds[r]), dataset_len=32, **plain())]
                for r in range(2)
            )
        )

    assert said(ShardsDoNotCover, run(20)).severity is Severity.WARNING
    silent(ShardsDoNotCover, run(32))


@pytest.mark.parametrize("resampled", [False, True])
def test_what_ranks_that_draw_with_replacement_have_in_common_is_chance(resampled: bool) -> None:
    shares = [list(range(32)), list(range(20, 52))]
    told = [[event("dataset", kind="Stream", resampled=resampled), *stream(r, shares[r])] for r in range(2)]
    assert [f.code for f in builder.findings(IterableNotSharded, two(*told))] == ([] if resampled else ["DAT107"])


def test_an_order_of_its_own_is_named_where_its_seed_is() -> None:
    shares = [list(range(32)), list(range(20, 52))]
    told = [[event("dataset", kind="Stream", resampled=False, own_order=site(8, "rng.shuffle(files)")), *stream(r, shares[r])] for r in range(2)]
    found = said(IterableNotSharded, two(*told))
    assert found.where is not None and found.where.line == 8


def test_epoch_set_on_one_rank_only_is_another_cause() -> None:
    run = two(
        *([e for n in range(2) for e in one_pass(n, share(rank, n * (rank == 0)), **shuffled(rank, n * (rank == 0)))] for rank in range(2))
    )
    silent(EpochNotSet, run)
    assert "epoch differs" in said(SeedDiffers, run).message


def test_resume_from_another_runs_checkpoint() -> None:
    def run(epoch: int, stored: dict[str, int]) -> Run:
        loaded = [event("load", path="/c.pt", done=True, numbers=stored), event("load_optimizer", kind="SGD")]
        return two(*([*loaded, *one_pass(0, share(rank, epoch), **shuffled(rank, epoch))] for rank in range(2)))

    assert "epoch 3" in said(ShuffleRestarts, run(0, {"epoch": 3})).message
    silent(ShuffleRestarts, run(3, {"epoch": 3}))
    silent(ShuffleRestarts, run(0, {"epoch": 0}))
    silent(ShuffleRestarts, run(0, {"best_epoch": 3}))


def replays(order: list[int], *, own: Sequence[Event] = (), **fields: Any) -> Run:
    """One pass of four batches, and what went into the model at each step after it was opened."""
    rows = [row(i, batch=b, t_ns=10**15 + i) for i, b in enumerate(order)]
    events = [[*one_pass(0, share(rank)[:16], **(shuffled(rank, id=1) | fields)), *own] for rank in range(2)]
    return two(*events, rows=(rows, rows))


def test_the_batches_of_one_pass_for_ever() -> None:
    found = said(EpochNotSet, replays([11, 12, 13, 14] * 4))
    assert found.severity is Severity.ERROR and "4 batches of one pass" in found.message and "12 steps" in found.notes[0]
    silent(EpochNotSet, replays(list(range(11, 27))))  # new batches each time
    silent(EpochNotSet, replays([11, 12, 13, 14] * 2))  # too few to say
    silent(EpochNotSet, replays([11] * 16))  # one fixed batch
    silent(EpochNotSet, replays([11, 12, 13, 14] * 4, distributed={"num_replicas": 2, "rank": 0, "shuffle": False}))
    silent(EpochNotSet, replays([11, 12, 13, 14] * 4, complete=False))


def test_a_list_of_batches_may_be_meant() -> None:
    kept = event("batches_held", loop=0, alive=4)
    listed = {"backwards": 0, "steps": 0}
    assert said(EpochNotSet, replays([11, 12, 13, 14] * 4, own=[kept], **listed)).severity is Severity.ADVICE
    late = event("set_epoch", t=10**14, line=50, epoch=1, sampler=1)
    found = said(EpochNotSet, replays([11, 12, 13, 14] * 4, own=[kept, late], **listed))
    assert found.severity is Severity.ERROR and "set_epoch() at line 50" in found.notes[1]
    silent(EpochNotSet, replays([11, 12, 13, 14] * 4, own=[event("batches_held", loop=0, alive=0)], **listed))  # statistics of the data


def test_equal_batches_from_a_step_on() -> None:
    def run(own: list[int], other: list[int], *events: Event) -> Run:
        tables = [[row(i, batch=b, loss=b / 10) for i, b in enumerate(batches)] for batches in (own, other)]
        return two([*events], [*events], rows=(tables[0], tables[1]))

    apart, same = [[r * 100 + i for i in range(6)] for r in (1, 2)], list(range(300, 312))
    found = said(NotSharded, run(apart[0] + same, apart[1] + same, event("load", line=70, s=6, done=True)))
    assert found.severity is Severity.ERROR and found.where is not None and found.where.line == 70 and "from step 6 on" in found.message
    assert said(NotSharded, run(apart[0] + same, apart[1] + same)).severity is Severity.WARNING
    silent(NotSharded, run(apart[0] + same[:5], apart[1] + same[:5]))
    silent(NotSharded, run(apart[0] + [300] * 12, apart[1] + [300] * 12))  # one batch that all look at
    silent(NotSharded, run(apart[0] + same + [1], apart[1] + same + [2]))  # not to the end


def test_an_epoch_that_is_a_constant() -> None:
    def run_of(*epochs: int) -> Run:
        told = [event("set_epoch", line=54, epoch=e, sampler=7) for e in epochs]
        return two(*([*told, *(e for n in range(2) for e in one_pass(n, share(r), **shuffled(r, id=7)))] for r in range(2)))

    found = said(EpochNotSet, run_of(4, 4))
    assert found.where is not None and found.where.line == 54 and "called with 4 every time" in found.message
    for other in ((), (4,), (0, 1)):  # never, once, or what the sampler did not heed
        found = said(EpochNotSet, run_of(*other))
        assert found.where is not None and found.where.line == 40


# ---- DAT116 ----
def foreign(num: int = 32, size: int = 64, *, trains: bool = True, **dealt: Any) -> Run:
    """Both ranks draw the indices of a set of `num` from a loader over one of `size`."""
    told = {"kind": "Subset", "len": num, "first": False, "plain": False, **dealt}
    how = {} if trains else {"backwards": 0, "grad": False, "training": False}
    return two(*(one_pass(0, share(r, num=num), dataset_len=size, dealt=told, **shuffled(r), **how) for r in range(2)))


def test_a_loader_with_the_sampler_of_another_set() -> None:
    found = said(SamplerOfAnotherSet, foreign())
    assert found.where is not None and found.where.line == 20 and "first 32 of its 64" in found.message
    assert "measures" in said(SamplerOfAnotherSet, foreign(trains=False)).message
    lost = event("set_epoch", line=50, epoch=1, sampler=99)
    run = foreign()
    run.ranks[0].events.append(lost)  # type: ignore[union-attr]
    builder.findings(SamplerOfAnotherSet, run)


def test_samplers_over_another_object_that_are_meant() -> None:
    silent(SamplerOfAnotherSet, foreign(num=64))  # a wrapper of the same length
    silent(SamplerOfAnotherSet, foreign(plain=True))  # DistributedSampler(range(32)): a part on purpose
    silent(SamplerOfAnotherSet, foreign(first=True))  # the first part of the loader's own set
    silent(SamplerOfAnotherSet, foreign(num=64, size=65))  # all but one
    curriculum = two(*(
        [*one_pass(0, share(r, num=32), dealt={"kind": "Data", "len": 32}, **shuffled(r)), *one_pass(1, share(r), **shuffled(r))] for r in range(2)
    ))  # fmt: skip
    silent(SamplerOfAnotherSet, curriculum)  # the whole set comes later


def after_a_load(skips: list[int], *, loaded: bool = True, forwards: int = 1) -> Run:
    """Passes of 10 batches behind a load, of which the first `skips` are not trained on; one step a batch."""
    indices, own, rows = list(range(40)), [event("load", line=9, path="last.pt")] if loaded else [], []
    for epoch, skip in enumerate(skips):
        begun = len(rows)
        rows += [row(begun + n, num_forward=forwards if n == 0 else 1) for n in range(10 - skip)]
        opened, closed = one_pass(epoch, indices, backwards=10 - skip, steps=10 - skip, s=len(rows))
        own += [opened, Event("pass", closed.t_ns, len(rows), {**closed.data, "first_trained": skip + 1})]
    return two(own, list(own), rows=(rows, rows))


def test_a_resume_that_skips_in_every_epoch() -> None:
    assert "first 6 of 10 batches" in said(SkippedAgain, after_a_load([6, 6, 6])).message


def test_what_is_skipped_once_or_used_otherwise_is_healthy() -> None:
    silent(SkippedAgain, after_a_load([6, 0, 0]))
    silent(SkippedAgain, after_a_load([2, 2], forwards=3))  # they calibrate the model first
    with pytest.raises(NotApplicable, match="no checkpoint is loaded"):
        list(SkippedAgain().end(after_a_load([6, 6], loaded=False)))


def reseeded(values: list[int], opts: list[int], *, period: int = 4, fresh: bool = False, fed: bool = True) -> Run:
    """A seeding in front of each epoch of `period` steps, and one draw a step."""
    events, rows = one_pass(0, list(range(16))) if fed else [], []
    for epoch, value in enumerate(values):
        events.append(event("seed", line=70, what="torch", value=value, s=epoch * period))
        for n in range(period):
            at = epoch * period + n
            digest = 100 * value + n + (1000 * at if fresh else 0)
            events.append(event("draw", line=43, fn="randn_like", at=at, num=1, digest=digest, grad=True, data=False, s=at))
            rows.append(row(at, opt=opts[epoch]))
    return two(events, events, rows=(rows, rows))


def test_noise_that_repeats_with_the_seed_of_every_epoch() -> None:
    found = said(NoiseRepeats, reseeded([43, 43, 43], [0, 0, 0]))
    assert found.where is not None and found.where.line == 70 and "train.py:43" in found.message and found.severity is Severity.WARNING


def test_draws_that_may_be_the_data_set_itself_are_advice() -> None:
    assert said(NoiseRepeats, reseeded([43, 43, 43], [0, 0, 0], fed=False)).severity is Severity.ADVICE


def test_seeds_of_epochs_of_their_own_or_of_other_trials_are_healthy() -> None:
    silent(NoiseRepeats, reseeded([43, 44, 45], [0, 0, 0]))
    silent(NoiseRepeats, reseeded([43, 43, 43], [0, 1, 2]))
    silent(NoiseRepeats, reseeded([43, 43, 43], [0, 0, 0], fresh=True))  # a generator of its own is drawn from


# ---- DAT125: inputs scaled by the own share's mean and deviation ----
def scaled(mean: tuple[float, ...] = (1.0, 5.0), after: tuple[list[int], ...] = ([4, 8], [4, 8]), cubes: tuple[float, ...] = (3.0, 4.0), read: bool = True) -> Run:
    """Two ranks under DDP; `mean`: what each takes off its one column."""

    def events(rank: int) -> list[Event]:
        scales = [{"name": "mean", "mean": [mean[rank]], "std": [2.0]}] if read else []
        told = event("own_scale", line=42, applied=site(43), after=after[rank], rows=60, columns=1, of=1, thirds=[cubes[rank]], scales=scales)
        return [ddp(), event("params", opt=0, names=["w"], shapes=[[1]], ddp=[0]), *([told] if after[rank] else [])]

    steps = [row(s, num_reduce=1, flags=protocol.FLAG_DDP) for s in range(8)]
    return two(*(events(r) for r in range(2)), rows=(steps, steps))


def test_inputs_scaled_by_the_own_share() -> None:
    found = said(OwnScale, scaled())
    assert (found.severity, found.where and found.where.line, found.ranks) == (Severity.WARNING, 42, (0, 1))
    assert "1 +- 2 (rank 0), 5 +- 2 (rank 1)" in found.message
    assert said(OwnScale, scaled(read=False)).severity is Severity.ADVICE


@pytest.mark.parametrize(
    "near",
    [
        {"mean": (1.0, 1.05)},  # shares of one shuffled set
        {"cubes": (3.0, 3.0)},  # the ranks have the same rows
        {"after": ([4, 8], [])},  # one rank's inputs are not
        {"after": ([4, 8], [5, 10])},  # a chance
    ],
)
def test_inputs_scaled_alike(near: dict[str, Any]) -> None:
    silent(OwnScale, scaled(**near))


def test_equal_shares_are_led_to_the_default_that_makes_them_equal() -> None:
    def unset() -> list[Any]:
        return [event("rank_default", line=14 + n, variable=v, default=d, cut=site(63)) for n, (v, d) in enumerate((("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")))]

    found = said(NotSharded, two(*([*one_pass(0, share(0), **plain()), *unset()] for r in range(2))))
    assert found.where is not None and found.where.line == 14 and "takes the default of SLURM_PROCID, which is not set here" in found.message
    assert "train.py:63 takes comes from SLURM_PROCID (line 14, default 0) and SLURM_NTASKS (line 15, default 1)" in found.notes[0]
    alone = said(NotSharded, two(*([*one_pass(0, share(0), **plain()), *(unset() if r else [])] for r in range(2))))
    assert "SLURM" not in alone.message
