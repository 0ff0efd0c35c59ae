"""Throughput checks: times made by hand, with and without a cause."""

from __future__ import annotations

import random

import pytest

from harness.checks.base import Inconclusive
from harness.checks.prf.anomaly_mode import AnomalyModeLeftOn
from harness.checks.prf.bias_before_batchnorm import BiasBeforeBatchnorm
from harness.checks.prf.collective_per_parameter import CollectivePerParameter
from harness.checks.prf.compiled_every_step import CompiledEveryStep
from harness.checks.prf.file_reloaded import FileReloaded
from harness.checks.prf.find_unused_needless import FindUnusedNeedless
from harness.checks.prf.loader_bound import LoaderBound
from harness.checks.prf.pinned_together import RanksPinnedTogether
from harness.checks.prf.poor_scaling import PoorScaling
from harness.checks.prf.saves_every_step import SavesEveryStep
from harness.checks.prf.straggler import Straggler
from harness.checks.prf.sync_every_micro_batch import SyncEveryMicroBatch
from harness.checks.prf.threads_oversubscribed import ThreadsOversubscribed
from harness.checks.prf.weights_sent_again import WeightsSentAgain
from harness.checks.prf.workers_restarted import WorkersRestarted
from harness.model import Severity
from harness.record import Event, Recording, Run
from tests.unit.checks.builder import event, findings, recording, row, run, site
from tests.unit.checks.replica_runs import setup

WRAP = {"index": 0, "numels": [100], "names": ["w"], "find_unused": False, "static_graph": False, "buffers": [], "batchnorms": 0}


def cores(of: Run, num: int = 8) -> Run:
    of.num_cores = num
    return of


def accumulating(backwards: int, reduces: int, sites: int = 1, forwards: int | None = None, extra: tuple[Event, ...] = ()) -> Run:
    def rank(r: int) -> Recording:
        places = [[site(60 + i), backwards // sites] for i in range(sites)]
        events = [event("wrap", line=5, **WRAP), *extra]
        events += [event("accumulation", s=s, sites=places, reduces=reduces, line=60) for s in range(8)]
        num = backwards if forwards is None else forwards
        return recording(events, [row(s, num_backward=backwards, num_reduce=reduces, num_forward=num) for s in range(8)], rank=r)

    return run([rank(0), rank(1)])


def test_every_micro_batch_synchronises() -> None:
    (found,) = findings(SyncEveryMicroBatch, accumulating(4, 4))
    assert found.message == "gradients are all-reduced 4 times a step, once for every micro-batch"
    assert found.where and found.where.line == 60 and found.ranks == (0, 1)


def test_no_sync_that_comes_too_late_is_named() -> None:
    (found,) = findings(SyncEveryMicroBatch, accumulating(4, 4, extra=(event("no_sync", line=58),)))
    assert found.where and found.where.line == 58 and any("only around backward" in n for n in found.notes)


@pytest.mark.parametrize(
    "healthy",
    [accumulating(4, 1), accumulating(1, 1), accumulating(2, 2, sites=2), accumulating(3, 3, forwards=1)],
    ids=["no_sync", "no accumulation", "two losses of a GAN", "several losses of one forward"],
)
def test_other_backwards_are_healthy(healthy: Run) -> None:
    assert findings(SyncEveryMicroBatch, healthy) == []


def paced(slow: float, noise: float = 0.0, steps: int = 60, events: tuple[Event, ...] = ()) -> Run:
    random.seed(3)

    def rank(r: int) -> Recording:
        own = [(slow if r == 1 else 0.010) + random.uniform(0, noise) for _ in range(steps)]
        return recording(events if r == 1 else (), [row(s, self_s=own[s], wall_s=0.05) for s in range(steps)], rank=r)

    return cores(run([rank(0), rank(1)]))


def test_a_straggler_and_its_line() -> None:
    profile = event("profile", samples=40, lines=[[site(13, "time.sleep(.02)"), 25]], load=1.0)
    (found,) = findings(Straggler, paced(0.030, events=(profile,)))
    assert found.ranks == (1,) and found.where and found.where.line == 13
    assert found.message == "rank 1 takes 20 ms more of its own a step than the others, and they wait for it"


@pytest.mark.parametrize("healthy", [paced(0.010), paced(0.012), paced(0.014, noise=0.03), paced(0.030, steps=15)])
def test_equal_noisy_and_short_runs_have_no_straggler(healthy: Run) -> None:
    assert findings(Straggler, healthy) == []


def test_ranks_that_share_a_core_are_not_judged() -> None:
    check = Straggler()
    with pytest.raises(Inconclusive, match="take turns"):
        list(check.end(cores(paced(0.030), 1)))


def test_a_busy_host_asks_for_more() -> None:
    load = event("profile", samples=40, lines=[], load=20.0)
    assert findings(Straggler, paced(0.016, events=(load,))) == []
    assert len(findings(Straggler, paced(0.040, events=(load,)))) == 1


def weighed(*passes: tuple[int, int]) -> Run:
    """On a busy host rank 1 takes 1.6 times as long; (numbers of rank 0, of rank 1) in the 20 batches of each pass."""
    load = event("profile", samples=40, lines=[], load=20.0)

    def rank(r: int) -> Recording:
        told = [event("pass", line=30, loop=n, backwards=20, weighed=[20, 20 * numbers[r]]) for n, numbers in enumerate(passes)]
        return recording([load, *told], [row(s, self_s=(0.010, 0.016)[r], wall_s=0.05) for s in range(60)], rank=r)

    return cores(run([rank(0), rank(1)]))


def test_larger_batches_are_no_matter_of_the_load() -> None:
    (found,) = findings(Straggler, weighed((860, 3740), (860, 3740)))
    assert (found.severity, found.ranks, found.where and found.where.line) == (Severity.WARNING, (1,), 30)
    assert "its batches are 4.3 times as large as the others' in every pass over the data: 3,740 against 860 numbers" in found.notes
    assert "order[rank::world_size]" in found.help


@pytest.mark.parametrize("passes", [[(860, 900)], [(3740, 860)], [(860, 3740), (3740, 3800)], []], ids=["alike", "the other rank's", "one pass", "no loader"])
def test_a_busy_host_and_no_larger_batches(passes: list[tuple[int, int]]) -> None:
    assert findings(Straggler, weighed(*passes)) == []


def crowded(own: tuple[float, float], waited: tuple[float, float], known: bool = True) -> Run:
    """Two ranks whose own work of a step takes own + waited seconds; `known`: the wait was seen to lie in that part of the step."""

    def rank(r: int) -> Recording:
        fields = {"self_s": own[r] + (waited[r] if known else 0.0), "self_queue_s": waited[r] if known else 0.0}
        fields |= {"step_s": 0.0 if known else waited[r]}
        return recording((), [row(s, queue_s=waited[r], wall_s=0.2, **fields) for s in range(60)], rank=r)

    return cores(run([rank(0), rank(1)]))


def test_a_crowded_host_neither_hides_a_straggler_nor_makes_one() -> None:
    assert [f.ranks for f in findings(Straggler, crowded((0.005, 0.030), (0.060, 0.040)))] == [(1,)]
    assert findings(Straggler, crowded((0.010, 0.010), (0.002, 0.080))) == []
    check = Straggler()
    with pytest.raises(Inconclusive, match="no rank waits for a core, 0 of 57"):
        list(check.end(crowded((0.010, 0.010), (0.002, 0.080), known=False)))


def held_up(behind_s: float, every: int = 1, *, backwards: int = 1, coll_s: float = 0.0, device: str = "cpu", wrapped: bool = True) -> Run:
    """DDP: rank 0 is busy between backward and step, so that rank 1 waits in its next backward."""

    def rank(r: int) -> Recording:
        events = [event("params", opt=0, devices=[device]), *([event("wrap", **WRAP)] if wrapped else [])]
        late = [behind_s * (s % every == 0) for s in range(60)]
        times = [{"self_s": 0.004, "step_s": 0.001, "coll_s": coll_s, "wall_s": 0.010 + own} for own in late]
        rows = [row(s, num_backward=backwards, backward_s=0.005 + late[s] * r, **times[s]) for s in range(60)]
        return recording(events, rows, rank=r)

    return cores(run([rank(0), rank(1)]))


def test_a_straggler_between_backward_and_step() -> None:
    assert [f.ranks for f in findings(Straggler, held_up(0.030))] == [(0,)]
    assert findings(Straggler, held_up(0.030, every=5)) == []  # every fifth step
    assert findings(Straggler, held_up(0.003)) == []
    assert findings(Straggler, held_up(0.030, backwards=2)) == []  # the forward of a second micro-batch lies in there
    assert findings(Straggler, held_up(0.030, coll_s=0.001)) == []
    assert findings(Straggler, held_up(0.030, device="cuda:0")) == []  # a number read there waits for the all-reduce
    assert findings(Straggler, held_up(0.030, wrapped=False)) == []


def fed(share: float, steps: int, wall_s: float = 0.2, workers: int = 0) -> Run:
    rows = [row(s, wall_s=wall_s, data_s=share * wall_s) for s in range(steps)]
    return cores(run([recording([event("loader", num_workers=workers, line=20)], rows)]))


@pytest.mark.parametrize(
    ("of", "severities"),
    [
        (fed(0.8, 80), [Severity.WARNING]),
        (fed(0.55, 80), [Severity.ADVICE]),
        (fed(0.8, 30), [Severity.WARNING]),  # 160 ms a batch
        (fed(0.8, 80, wall_s=0.03), [Severity.ADVICE]),  # a toy: 24 ms
        (fed(0.8, 10), []),
        (fed(0.3, 80), []),
        (fed(0.8, 80, workers=16), []),
    ],
)
def test_waiting_for_data(of: Run, severities: list[Severity]) -> None:
    assert [f.severity for f in findings(LoaderBound, of)] == severities


def test_waiting_for_a_core_is_not_waiting_for_data() -> None:
    def fetched(data_s: float, queued: float, before: float) -> Run:
        rows = [row(s, wall_s=0.2, data_s=data_s, self_s=0.17, queue_s=queued, self_queue_s=before) for s in range(80)]
        return cores(run([recording([event("loader", num_workers=0, line=20)], rows)]))

    assert findings(LoaderBound, fetched(0.16, 0.15, 0.15)) == []
    assert len(findings(LoaderBound, fetched(0.16, 0.05, 0.01))) == 1


def searching(unused: int, looks: int = 16, static: bool = False) -> Run:
    wrap = event("wrap", line=5, **{**WRAP, "find_unused": True, "static_graph": static})
    used = [event("used", index=0, num=4, num_unused=0, unused=[], complete=True) for _ in range(looks)]
    odd = [event("used", index=0, num=4, num_unused=unused, unused=["a"], complete=True)]
    return run([recording([wrap, *used], [row(0)], rank=0), recording([wrap, *used[1:], *odd], [row(0)], rank=1)])


def test_a_search_that_finds_nothing() -> None:
    (found,) = findings(FindUnusedNeedless, searching(0))
    assert found.where and found.where.line == 5 and found.notes == ("all 4 parameters were reached in 32 of 32 backwards looked at",)


@pytest.mark.parametrize("healthy", [searching(1), searching(0, looks=4), searching(0, static=True)])
def test_a_search_that_is_needed_or_too_short_to_tell(healthy: Run) -> None:
    assert findings(FindUnusedNeedless, healthy) == []


def test_threads_of_all_ranks_against_the_cores() -> None:
    def of(threads: int, num: int) -> Run:
        return cores(run([recording([event("torch", threads=threads)], rank=r) for r in range(2)]), num)

    assert [f.severity for f in findings(ThreadsOversubscribed, of(4, 4))] == [Severity.ADVICE]
    assert findings(ThreadsOversubscribed, of(2, 4)) == [] and findings(ThreadsOversubscribed, of(1, 1)) == []


def normalised(bias: bool) -> Run:
    names = ["0.weight", *(["0.bias"] if bias else []), "1.weight", "1.bias", "3.weight", "3.bias"]
    shapes = [[8, 3, 3, 3], *([[8]] if bias else []), [8], [8], [2, 8], [2]]
    events = [event("wrapping", names=names, shapes=shapes)]
    events.append(event("wrap", line=5, **{**WRAP, "names": names, "buffers": ["1.running_mean", "1.running_var"], "batchnorms": 1}))
    return run([recording(events)])


def test_a_bias_before_a_batchnorm_is_advice() -> None:
    (found,) = findings(BiasBeforeBatchnorm, normalised(True))
    assert found.severity is Severity.ADVICE and found.notes == ("0.bias",)
    assert findings(BiasBeforeBatchnorm, normalised(False)) == []


def scaled(many_s: float, one_s: float) -> Run:
    def of(num: int, wall_s: float, samples: int) -> Run:
        return cores(run([recording([], [row(s, wall_s=wall_s, num_samples=samples) for s in range(40)], rank=r) for r in range(num)]))

    both = of(2, many_s, 16)
    both.reference = of(1, one_s, 32)
    return both


def test_scaling_against_the_reference() -> None:
    assert [f.severity for f in findings(PoorScaling, scaled(0.1, 0.08))] == [Severity.ADVICE]
    assert findings(PoorScaling, scaled(0.05, 0.08)) == []


ALL = (BiasBeforeBatchnorm, FindUnusedNeedless, LoaderBound, PoorScaling, Straggler, SyncEveryMicroBatch, ThreadsOversubscribed)


@pytest.mark.parametrize("check", ALL)
def test_empty_and_torn_recordings_never_crash(check: type) -> None:
    torn = [event(k) for k in ("wrap", "wrapping", "used", "accumulation", "loader", "torch", "profile", "no_sync", "devices")]
    torn.append(event("profile", samples="x", lines=[[None, 1], 3], load=None))
    of = run([recording(torn, [row(0)[:99]]), recording(torn, [row(s) for s in range(30)], rank=1)])
    of.reference = run([])
    findings(check, of)
    findings(check, run([]))


def reloading(num: int, took_s: float, steps: int) -> Run:
    told = event("reload", line=29, path="/data/set.pt", num=num, took_s=took_s, steps=steps)
    return run([recording([told], [row(s, wall_s=0.1) for s in range(33)])])


def test_a_file_loaded_for_every_item_is_named() -> None:
    (found,) = findings(FileReloaded, reloading(512, 2.0, 16))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 29


def test_files_loaded_for_every_item_count_together() -> None:
    def of(took_s: float, function: str) -> Run:
        told = [
            event("reload", site=site(30 + i % 2, func="read" if i % 2 else function), path=f"/data/{i}.npz", num=64, took_s=took_s, steps=9) for i in range(4)
        ]
        return run([recording(told, [row(s, wall_s=0.1) for s in range(33)])])

    (found,) = findings(FileReloaded, of(0.3, "read"))
    assert "the same 4 files are loaded whole 128 times" in found.message and "1.2 s of 3" in found.notes[0]
    assert findings(FileReloaded, of(0.3, "other")) == []  # neither function alone


def test_a_file_that_is_loaded_in_every_step_is_reckoned_to_the_end() -> None:
    def of(steps: int) -> Run:
        told = event("reload", line=29, s=15, path="/data/set.pt", num=512, took_s=0.3, steps=steps)
        return run([recording([told], [row(s, wall_s=0.03) for s in range(32)])])

    (found,) = findings(FileReloaded, of(16))
    assert "0.6 s of 0.9 s" in found.notes[0]
    assert findings(FileReloaded, of(8)) == []  # now and then: what was told is all that is known


def test_quick_or_early_loads_are_healthy() -> None:
    assert findings(FileReloaded, reloading(512, 0.4, 16)) == []
    assert findings(FileReloaded, reloading(64, 2.0, 1)) == []


# ---- PRF109: a checkpoint in every step ----
MS = 1_000_000


def saving(
    steps: list[int], save_ms: int = 40, step_ms: int = 60, path: str = "/tmp/a.pt", passes: bool = False, num_rows: int = 80
) -> Run:
    """Rank 0 saves before these steps; a step takes `step_ms`, a save `save_ms` of it."""
    events: list[Event] = []
    for s in steps:
        at = 10**12 + s * step_ms * MS
        events.append(event("save", s=s, t=at, line=58, path=path, done=False, error=""))
        events.append(event("save", s=s, t=at + save_ms * MS, line=58, path=path, done=True, error=""))
        if passes:
            events.append(event("pass", s=s, t=at, line=50, backwards=1, complete=True))
    rows = [row(s, t_ns=10**12 + s * step_ms * MS) for s in range(num_rows)]
    return run([recording(events, rows), recording([], rows, rank=1)])


def test_a_checkpoint_in_every_step() -> None:
    (found,) = findings(SavesEveryStep, saving(list(range(1, 41))))
    assert (found.code, found.severity, found.where and found.where.line, found.ranks) == ("PRF109", Severity.WARNING, 58, (0,))
    assert "40 in steps 1 to 40" in found.message
    assert [f.code for f in findings(SavesEveryStep, saving([s for s in range(1, 60) if s % 20]))] == ["PRF109"]  # nearly all
    assert [f.severity for f in findings(SavesEveryStep, saving(list(range(1, 41)), passes=True))] == [
        Severity.ADVICE
    ]  # epochs of one step


@pytest.mark.parametrize(
    "healthy",
    [
        saving(list(range(5, 80, 5))),  # every fifth step
        saving(list(range(1, 16))),  # a few improvements at the start
        saving(list(range(1, 41)), save_ms=2),  # next to nothing
        saving(list(range(1, 41)), path=""),  # into memory
        saving(list(range(1, 80, 20))),
    ],
    ids=["every fifth", "too few", "quick", "in memory", "epochs"],
)
def test_checkpoints_now_and_then(healthy: Run) -> None:
    assert findings(SavesEveryStep, healthy) == []


# ---- PRF110: anomaly detection ----
def with_anomaly(steps: int, num_rows: int = 40, *argv: str) -> Run:
    told = [event("anomaly", line=12, steps=n) for n in (20, 40, 80) if n <= steps]
    return run([recording(told, [row(s) for s in range(num_rows)], argv=["train.py", *argv])])


def test_anomaly_detection_left_on() -> None:
    (found,) = findings(AnomalyModeLeftOn, with_anomaly(40))
    assert (found.code, found.severity, found.where and found.where.line) == ("PRF110", Severity.WARNING, 12)
    assert [f.severity for f in findings(AnomalyModeLeftOn, with_anomaly(40, 40, "--detect-anomaly"))] == [Severity.ADVICE]


@pytest.mark.parametrize(
    "healthy", [with_anomaly(0), with_anomaly(12), with_anomaly(30, 200)], ids=["never", "twelve steps", "at the start"]
)
def test_anomaly_detection_for_a_look(healthy: Run) -> None:
    assert findings(AnomalyModeLeftOn, healthy) == []


# ---- PRF111: loader workers started for every epoch ----
def epochs(
    num: int = 12,
    start_s: float = 0.1,
    first_s: float = 0.2,
    rest_s: float = 0.02,
    end_s: float = 0.05,
    *,
    wall_s: float = 6.0,
    **loader: object,
) -> Run:
    fields = {"num_workers": 2, "persistent": False, "made": site(44)} | loader
    events: list[Event] = []
    for n in range(num):
        events.append(event("loader", t=10**12 + n, line=50, loop=n, **fields))
        events.append(event("pass", line=50, loop=n, complete=True, num_batches=4, times=[start_s, first_s, rest_s, end_s]))
    rows = [row(s, t_ns=10**12 + int((s + 1) * wall_s * 1e9 / 40)) for s in range(40)]
    return run([recording(events, rows), recording(events, rows, rank=1)])


def test_loader_workers_are_started_in_every_epoch() -> None:
    (found,) = findings(WorkersRestarted, epochs())
    assert (found.code, found.severity, found.where and found.where.line) == ("PRF111", Severity.WARNING, 44)
    assert "2 loader workers in each of 12 short epochs" in found.message
    assert [f.severity for f in findings(WorkersRestarted, epochs(num=6, wall_s=4.0))] == [Severity.ADVICE]  # tried out for a few epochs


@pytest.mark.parametrize(
    "healthy",
    [
        epochs(persistent=True),
        epochs(num_workers=0),
        epochs(num=3),
        epochs(wall_s=60.0),  # long epochs
        epochs(start_s=0.02, first_s=0.3, rest_s=0.9, end_s=0.02),  # a slow dataset: the first batch takes what every batch takes
        epochs(start_s=0.01, first_s=0.02, end_s=0.01, wall_s=2.0),  # quick starts
    ],
    ids=["persistent", "no workers", "three passes", "long epochs", "slow dataset", "quick"],
)
def test_loader_workers_that_cost_little(healthy: Run) -> None:
    assert findings(WorkersRestarted, healthy) == []


def let_go(
    num: int = 40, batches: int = 1, start_s: float = 0.05, end_s: float = 0.02, *, wall_s: float = 4.0, text: str = "x = next(iter(loader))", **loader: object
) -> Run:
    """`next(iter(loader))`, `num` times in 40 steps."""
    fields = {"num_workers": 2, "persistent": False, "made": site(44)} | loader
    events: list[Event] = []
    for n in range(num):
        events.append(event("loader", t=10**12 + n, site=site(50, text), loop=n, **fields))
        events.append(event("pass", line=50, loop=n, complete=False, num_batches=batches, times=[start_s, 0.03, 0.0, end_s]))
    rows = [row(s, t_ns=10**12 + int((s + 1) * wall_s * 1e9 / 40)) for s in range(40)]
    return run([recording(events, rows), recording(events, rows, rank=1)])


def test_loader_workers_are_started_for_every_batch() -> None:
    (found,) = findings(WorkersRestarted, let_go())
    assert (found.severity, found.where and found.where.line) == (Severity.WARNING, 50)
    assert "70% of the time" in found.message and "for one batch each time, 40 times" in found.message and "keep the iterator" in found.help
    for left in (let_go(batches=3), let_go(text="for x in loader:")):  # loops that are left by a `break`
        (found,) = findings(WorkersRestarted, left)
        assert found.where and found.where.line == 44 and "persistent_workers" in found.help and found.severity is Severity.ADVICE


@pytest.mark.parametrize(
    "healthy",
    [
        let_go(1),  # a batch to look at
        let_go(4),
        let_go(num_workers=0),
        let_go(persistent=True),
        let_go(10, wall_s=20.0),  # an evaluation now and then
        let_go(batches=0),  # nothing drawn
    ],
    ids=["once", "four times", "no workers", "persistent", "now and then", "nothing"],
)
def test_iterators_that_are_let_go_of_at_little_cost(healthy: Run) -> None:
    assert findings(WorkersRestarted, healthy) == []


# ---- PRF112: one collective for each parameter ----
def averaged_by_hand(
    num: int,
    each_ms: float = 2.0,
    step_ms: float = 300.0,
    numel: int = 256,
    wait_ms: float = 0.0,
    *,
    grad: bool = True,
    ranks: int = 2,
    apart: bool = False,
    every: int = 1,
    uneven: bool = False,
) -> Run:
    at_ms = [i * each_ms if not uneven else each_ms * (i // 3 * 3 + (0.25, 0.5, 0.75)[i % 3]) for i in range(num)]

    def rank(r: int) -> Recording:
        events = [
            event(
                "coll",
                s=s,
                t=10**12 + int((s * step_ms + (wait_ms if i else 0) + at_ms[i]) * MS),
                line=34,
                op="all_reduce",
                grad=grad,
                numel=numel,
            )
            for s in range(0, 20 * every, every)
            for i in range(num)
        ]
        if apart:
            events.append(event("coll_site", line=34, op="all_reduce", ways=[], loop=site(30), apart=True))
        rows = [row(s, wall_s=step_ms / 1e3, num_coll=num, coll_s=(num * each_ms + wait_ms) / 1e3) for s in range(20 * every)]
        return recording(events, rows, rank=r)

    return cores(run([rank(r) for r in range(ranks)]))


def test_one_collective_for_the_norm_of_each_parameter() -> None:
    (found,) = findings(CollectivePerParameter, averaged_by_hand(130, numel=1, grad=False, apart=True))
    assert (found.code, found.severity, found.where and found.where.line) == ("PRF112", Severity.WARNING, 34)
    assert found.message == "130 small tensors are all-reduced one by one in every step: 87% of its time"
    assert "torch.stack" in found.help


def test_one_collective_for_each_parameter() -> None:
    (found,) = findings(CollectivePerParameter, averaged_by_hand(130))
    assert (found.code, found.severity, found.where and found.where.line) == ("PRF112", Severity.WARNING, 34)
    assert found.message == "130 small gradients are all-reduced one by one in every step: 87% of its time"
    assert [f.severity for f in findings(CollectivePerParameter, averaged_by_hand(40))] == [Severity.ADVICE]
    assert [f.severity for f in findings(CollectivePerParameter, cores(averaged_by_hand(130), 1))] == [Severity.ADVICE]  # ranks take turns


def test_what_collectives_take_together_counts_on_a_busy_host() -> None:
    of = averaged_by_hand(130, numel=1, grad=False, apart=True, uneven=True)
    (found,) = findings(CollectivePerParameter, of)  # every third takes 5 ms, the others 0.5 ms
    assert found.severity is Severity.WARNING


@pytest.mark.parametrize(
    "healthy",
    [
        averaged_by_hand(10, each_ms=20),  # a few parameters
        averaged_by_hand(130, each_ms=0.2),  # quick ones
        averaged_by_hand(60, numel=1_000_000),  # bound by bandwidth
        averaged_by_hand(60, each_ms=0.3, wait_ms=200),  # the first waits for a slower rank
        averaged_by_hand(130, grad=False),  # no gradients, and what a turn sends may be what the one before got
        averaged_by_hand(130, numel=4096, grad=False, apart=True),  # activations
        averaged_by_hand(130, grad=False, apart=True, every=2),  # not in every step
    ],
    ids=["few", "quick", "large", "a slower rank", "not gradients", "activations", "now and then"],
)
def test_collectives_that_are_no_burden(healthy: Run) -> None:
    assert findings(CollectivePerParameter, healthy) == []


@pytest.mark.parametrize(("calls", "fires"), [
    ([([0, 1, 2, 3], [0]), ([0, 1, 2, 3], [0])], True),
    ([([0, 1, 2, 3], [0]), ([0, 1, 2, 3], [1])], False),
    ([([0], [0]), ([0], [0])], False),  # a container of one core
    ([([0], [0]), ([1], [1])], False),  # the scheduler gave one core to each
    ([([0, 1, 2, 3], [0, 1]), ([0, 1, 2, 3], [0, 1])], False),  # the cores of one socket
    ([None, ([0, 1, 2, 3], [0])], False),
])  # fmt: skip
def test_ranks_that_bind_themselves_to_one_core(calls: list[tuple[list[int], list[int]] | None], fires: bool) -> None:
    recordings = [
        recording([event("pinned", line=23, before=call[0], after=call[1])] if call else [], [row(0)], rank=rank)
        for rank, call in enumerate(calls)
    ]
    found = findings(RanksPinnedTogether, run(recordings))
    assert len(found) == fires
    if fires:
        assert found[0].where is not None and found[0].where.line == 23


# ---- PRF115: weights that DDP keeps equal are sent again ----
def sent_again(
    num: int = 20, *, each_ms: float = 1.0, steps: range = range(20), parted: int = -1, wrapped: bool = True, ranks: tuple[int, ...] = (0, 1), edited: bool = False
) -> Run:
    def rank(r: int) -> Recording:
        sends = [event("coll", s=s, line=45, op="broadcast", numel=64, replicated=5 + r * edited) for s in steps for _ in range(num)] if r in ranks else []
        rows = [row(s, param=100 + s + (1000 * r if s == parted else 0), wall_s=0.1, num_coll=num, coll_s=num * each_ms / 1e3) for s in range(20)]
        return recording([*setup(r, ddp=wrapped), *sends], rows, rank=r)

    return run([rank(0), rank(1)])


def test_weights_that_are_sent_again() -> None:
    (found,) = findings(WeightsSentAgain, sent_again())
    assert (found.code, found.severity, found.where and found.where.line) == ("PRF115", Severity.WARNING, 45)
    assert found.message == "20 parameters that DDP keeps equal are broadcast again in every step: 20% of its time"
    assert [f.severity for f in findings(WeightsSentAgain, sent_again(each_ms=0.1))] == [Severity.ADVICE]


def test_weights_that_are_sent_for_a_reason() -> None:
    assert findings(WeightsSentAgain, sent_again(parted=7)) == []  # the broadcast mends something
    assert findings(WeightsSentAgain, sent_again(steps=range(0, 20, 5))) == []  # a safeguard now and then
    assert findings(WeightsSentAgain, sent_again(steps=range(1))) == []  # once, before training
    assert findings(WeightsSentAgain, sent_again(wrapped=False)) == []
    assert findings(WeightsSentAgain, sent_again(ranks=(0,))) == []
    assert findings(WeightsSentAgain, sent_again(edited=True)) == []  # rank 0 prunes behind the step


# ---- PRF114: compiled in every step ----
def recompiled(num: int, last: int, *, compiled: bool = True, steps: int = 1, limit: int = 64) -> Run:
    told = [event("recompiled", line=7, expression="self.seen", num=num, first=1, last=last, seconds=4.5, limit=limit)] if num else []
    begun = [event("compile", line=3)] if compiled else []
    return run([recording([event("pg", done=True, rank=r, world_size=2), *begun, *told], [row(s) for s in range(steps)], rank=r) for r in range(2)])


def test_compiled_in_every_step() -> None:
    (found,) = findings(CompiledEveryStep, recompiled(12, 14))
    assert (found.code, found.where and found.where.line, found.ranks) == ("PRF114", 7, (0, 1))
    assert "compiled anew in 12 steps: `self.seen`" in found.message


def test_compilations_that_are_healthy() -> None:
    assert findings(CompiledEveryStep, recompiled(0, 0)) == []  # shapes at the start
    assert findings(CompiledEveryStep, recompiled(0, 0, compiled=False)) == []
    assert findings(CompiledEveryStep, recompiled(6, 80)) == []  # a number that changes once an epoch
    assert findings(CompiledEveryStep, recompiled(8, 8, steps=160)) == []  # a few values that come back


def test_torch_has_given_up_compiling() -> None:
    (found,) = findings(CompiledEveryStep, recompiled(8, 8, steps=160, limit=8))
    assert found.code == "PRF114"
