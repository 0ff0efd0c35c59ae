"""OPT: each check of the optimizer, loss and precision fires on its fault and is silent on the healthy run beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from builder import event, findings, recording, row, run, site
from replica_runs import NAMES, by_rank, setup, two_ranks

from harness.checks.engine import judge
from harness.checks.opt import (
    accumulation,
    cleared,
    clip_scaled,
    clipped_between,
    closure_local,
    edited,
    idle_schedule,
    long_schedule,
    lr,
    mean_of_means,
    mixed_step,
    same_gradient,
    scaled_step,
    scaler,
    scheduler,
    square_summed,
    stale,
    sum_loss,
    unstepped,
    zero_grad,
)
from harness.checks.registry import all_checks
from harness.model import Finding, Severity
from harness.probe.protocol import FLAG_ALL_NONE, FLAG_CHANGED, FLAG_DDP, FLAG_ZEROED
from harness.record import Event, Run

LOSS = {"reduction": "mean", "scaled": False, "root": ["NllLossBackward0"]}

CHECKS = {check.code: check for check in all_checks()}


def passes(rank: int, sizes: tuple[int, int]) -> list[Event]:
    return [event("loss", line=30, **LOSS), event("loader", line=29, loop=0, sampler="RandomSampler"),
            event("pass", line=29, loop=0, loader=0, num_samples=0, indices="", complete=True)]  # fmt: skip


def accumulated(count: int, **loss: Any) -> Any:
    site = {"file": "/home/u/train.py", "line": 30, "func": "main", "text": "loss.backward()"}
    return lambda rank: [event("loss", line=30, **(LOSS | loss)), *[event("accumulation", line=30, opt=0, s=s, sites=[[site, count]]) for s in range(6)]]


def searched(rank: int) -> list[Event]:
    """LBFGS under a sync by hand."""
    moved = [event("coll", line=42, op="all_reduce", numel=40, s=s) for s in range(1, 6)]
    backward = event("accumulation", line=40, opt=0, s=0, sites=[])
    return [*setup(rank, ddp=False, kind="LBFGS"), backward, event("accumulation", line=40, opt=0, s=9, sites=[]), *moved]


def lent(rank: int) -> list[Event]:
    """A gradient that was set once."""
    return [*setup(rank, ddp=False), event("accumulation", line=41, opt=0, sites=[]), event("gradients", opt=0, at_step={"0": [0.5]}, local={"0": [0.1]})]


def scaled(factor: float = 1.0, own: bool = True, **values: Any) -> Any:
    """Steps on the gradients of a scaled loss, which somebody multiplied by `factor` in between."""
    told = {"local": {"0": [2048.0, -512.0]}, "at_step": {"0": [2048.0 * factor, -512.0 * factor]}} | values
    steps = [e for s in range(3) for e in (event("gradients", opt=0, s=s, **told), event("scaled_step", line=31, s=s, opt=0, kind="SGD", scale=1024.0, own=own))]
    return lambda rank: [event("scaler_made", line=24, scale=1024.0, enabled=True), *steps]


def part(line: int, num: int = 4, stepped: tuple[int, ...] = (), caller: int = 70) -> dict[str, Any]:
    at = {"file": "/home/u/train.py", "func": "main", "text": "loss.backward()"}
    return {"site": at | {"line": line}, "caller": at | {"line": caller}, "num": num, "stepped": list(stepped)}


def mixed(*parts: dict[str, Any], together: bool = False) -> Run:
    """A GAN: optimizer 0 and 1 step in turn; every step of 0 but the first uses these parts."""
    return two_ranks(
        each=lambda r, s: {"opt": s % 2, "num_backward": int(not (together and s % 2))},
        extra=lambda r: [event("mixed_step", line=47, s=s, opt=0, parts=list(parts)) for s in range(2, 12, 2)],
    )


def one_cycle(total: int, *, samples: int = 90, exits: tuple[str, ...] = (), asked: int = 0, code: int = 0, resumed: bool = False) -> Run:
    """Three epochs over 90 samples in batches of 10, 5 on each of two ranks; the schedule was made for `total` steps."""
    out = [{"level": 1, "kind": kind, "site": None} for kind in exits]
    loop = {"sampler": "DistributedSampler", "dataset_len": samples, "planned": 5, "made": {"file": "t.py", "line": 28, "func": "main", "text": ""}}
    drawn = {"num_samples": samples // 2, "num_batches": 5, "batch_sizes": [10, 5, 5], "complete": True, "backwards": 5, "indices": ""}
    events = [
        event("scheduler_made", line=26, id=1, totals=[total], asked=asked), event("loop", line=29, of="loader", exits=out),
        *[e for n in range(3) for e in (event("loader", line=29, loop=n, loader=0, **loop), event("pass", line=29, loop=n, loader=0, **drawn))],
        *[event("scheduler", line=46, id=1, s=s) for s in range(1, 16)], *([event("load_scheduler", line=27)] if resumed else []),
    ]  # fmt: skip
    return two_ranks(steps=15, each=lambda r, s: {"sched": s}, extra=lambda r: events, exits=(code, 0))


def unstepped_event(s: int, *, num: int = 2, opts: dict[str, int] | None = None, why: str = "sibling", looks: int = 3, **fields: Any) -> Event:
    """What the probe says of parameters that no optimizer holds."""
    params = [{"name": n, "numel": 4, "since": 0, "looks": looks, "why": why} for n in ("tok", "pos")[:num]]
    told = {"opts": {"0": 4} if opts is None else opts, "num": num, "numel": 4 * num, "governed": 40, "made": None, "params": params}
    return event("unstepped", s=s, **(told | fields))


def left_in(where: int | None = 44, *, num: int = 4, opts: int = 0) -> Any:
    made = {"file": "/home/u/train.py", "line": where, "func": "restore", "text": "self.model = self.build()"} if where else None
    return lambda rank: [unstepped_event(s, num=num, opts={"0": opts}, made=made) for s in (6, 9)]


def nothing_from(step: int) -> Any:
    return lambda r, s: {"grad": 50 + s, "flags": FLAG_DDP | FLAG_CHANGED} if s < step else {"grad": 0, "flags": FLAG_DDP | FLAG_ALL_NONE}


FAULTS: dict[str, tuple[Any, Run, int | None]] = {
    "same_gradient": (same_gradient, two_ranks(steps=20, ddp=False, setup_of=lent, each=lambda r, s: {"grad": 7, "loss": 1.0 + s}), 41),
    "closure_local": (closure_local, two_ranks(ddp=False, setup_of=searched,
                      each=lambda r, s: {"grad": 0, "loss": 1.0 + r, "param": 100 + s + r * (s > 5)}), 40),
    "stale": (stale, two_ranks(each=by_rank(flags=(FLAG_DDP | FLAG_ALL_NONE, FLAG_DDP | FLAG_ALL_NONE))), 22),
    "no_gradient_in_shards": (stale, two_ranks(each=by_rank(flags=(FLAG_ALL_NONE, FLAG_ALL_NONE)), setup_of=lambda r: [*setup(r, ddp=False, sharded=True),
                              event("accumulation", line=59, opt=0, sites=[])]), 59),
    "orphaned": (stale, two_ranks(setup_of=lambda r: [*setup(r)[:3], event("params", line=22, opt=0, kind="SGD", names=NAMES, ddp=[0] * 4,
                                                                            owned=[True, True, True, False])], ungraded=(3,)), None),
    "gathered": (stale, two_ranks(setup_of=lambda r: [*setup(r, ddp=False, sharded=True)[:-1], event("params", line=22, opt=0, kind="SGD", sharded=True,
                                   names=NAMES, ddp=[-1] * 4, owned=[True, True, False, False], gathered=["head.weight", "head.bias"])]), 22),
    "left_behind": (stale, two_ranks(each=nothing_from(6), extra=left_in()), 44),
    "left_behind_uncleared": (stale, two_ranks(each=lambda r, s: {"grad": 50 + min(s, 6), "flags": FLAG_CHANGED}, extra=left_in(None)), 22),
    "unstepped": (unstepped, two_ranks(extra=lambda r: [unstepped_event(1, looks=1), unstepped_event(8)]), 22),
    "unstepped_listed": (unstepped, two_ranks(extra=lambda r: [unstepped_event(8, why="listed", numel=400, listed={"file": "/home/u/train.py",
        "line": 12, "func": "__init__", "text": ""})]), 12),
    "unstepped_late": (unstepped, two_ranks(extra=lambda r: [unstepped_event(8, why="late", made={"file": "/home/u/train.py", "line": 61,
                                                                                             "func": "grow", "text": "net.append(block)"})]), 61),
    "zero_grad": (zero_grad, two_ranks(each=by_rank(flags=(FLAG_CHANGED, FLAG_CHANGED))), 22),
    "lr": (lr, two_ranks(each=lambda r, s: {"hyper": 10 + r * (s > 2), "lr": 0.1 - 0.01 * r * (s > 2), "param": 100 + s + r * (s > 2)},
                         extra=lambda r: [event("scheduler", line=45, id=1, s=2)] * r), 45),
    "scheduler": (scheduler, two_ranks(extra=lambda r: [event("scheduler", line=46, id=1, s=s) for s in range(1, 8) for _ in (0, 1)]), 46),
    "sum_loss": (sum_loss, two_ranks(extra=accumulated(1, reduction="sum")), 30),
    "mean_of_means": (mean_of_means, two_ranks(each=by_rank(num_samples=(12, 4)), extra=lambda r: passes(r, (12, 4))), 29),
    "accumulation": (accumulation, two_ranks(extra=accumulated(4)), 30),
    "scaler": (scaler, two_ranks(each=by_rank(scale=(1024.0, 2048.0)), extra=lambda r: [event("scaler", line=47, scale=1.0)]), 47),
    "clip_scaled": (clip_scaled, two_ranks(extra=lambda r: [event("clip", line=48, scaled=True, scale=65536.0, norm=5e4, max_norm=1.0)]), 48),
    "edited": (edited, two_ranks(each=lambda r, s: {"param": 100 + s + r * (s > 5)}, wrong={"param": (1,)}), None),
    "scaled_step": (scaled_step, two_ranks(extra=scaled()), 31),
    "scaled_step_averaged": (scaled_step, two_ranks(extra=scaled(0.5)), 31),
    "mixed_step": (mixed_step, mixed(part(52, stepped=(1,)), part(44)), 47),
    "mixed_step_by_a_helper": (mixed_step, mixed(part(52, stepped=(1,)), part(52, caller=71)), 47),
    "long_schedule": (long_schedule, one_cycle(27), 26),
    "long_schedule_floor": (long_schedule, one_cycle(30, samples=100), 26),
    "cleared": (cleared, two_ranks(extra=lambda r: [event("gradients", opt=0, s=s, local={"0": [1.0]}, at_step={}) for s in range(3)]), 22),
}  # fmt: skip


def the_check(module: Any) -> Any:
    return next(c for c in all_checks() if c.__module__ == module.__name__)


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_at_its_line(name: str) -> None:
    module, faulty, line = FAULTS[name]
    found = findings(the_check(module), faulty)
    assert [f.code for f in found] == [the_check(module).code]
    if line is not None:
        assert found[0].where is not None and found[0].where.line == line


@pytest.mark.parametrize("name", FAULTS)
def test_the_healthy_run_is_left_alone(name: str) -> None:
    check = the_check(FAULTS[name][0])
    assert findings(check, two_ranks()) == []
    assert findings(check, two_ranks(ddp=False, extra=lambda r: [event("loss", line=30, **LOSS)])) == []


def sharded(root: str = "FSDPNet") -> Event:
    return event("params", opt=0, sharded=True, roots=[root])


def divided(*counts: tuple[float, float], ddp: bool = True, weight: float = 0.5, factor: float = 0.0, more: Sequence[Event] = ()) -> Run:
    """Losses that are divided by these counts, a pair a step; gradients averaged by DDP, or by hand to `weight` times their sum."""

    def told(rank: int) -> list[Event]:
        events = [*more, *(event("divisor", line=41, made=site(40), value=c[rank], factors=[1.0, 5 + factor * s], s=s) for s, c in enumerate(counts))]
        for s in range(0 if ddp else 3):
            events.append(event("gradients", opt=0, s=s, local={"0": [1.0 + rank]}, synced={"0": [3.0 * weight]}, at_step={"0": [3.0 * weight]}))
        return events

    return two_ranks(ddp=ddp, extra=told)


@pytest.mark.parametrize("ddp", [True, False])
def test_each_rank_divides_by_a_count_of_its_own(ddp: bool) -> None:
    (found,) = findings(the_check(mean_of_means), divided(*[(240, 60), (230, 70)] * 3, ddp=ddp))
    assert found.where is not None and found.where.line == 40 and "240, 60" in found.message


@pytest.mark.parametrize(
    "healthy",
    [
        divided(*[(300, 300)] * 6),  # the count of all ranks
        divided(*[(240, 200), (200, 240)] * 3),  # packed by length: now here, now there
        divided(*[(240, 240)] * 6, (240, 60)),  # one short batch
        divided(*[(240, 60)] * 6, ddp=False, weight=0.3),  # weighed by hand before they are summed
        divided(*[(240, 60)] * 6, factor=0.1),  # a term's factor differs from step to step: it may make up for the count
        divided(*[(240, 60), (60, 240)] * 3),  # far apart, in a few steps
        divided(*[(240, 60)] * 6, more=[event("leaf_hook", line=9, key=0, before=1.0, after=0.4, along=True)]),  # weighed by a hook
        divided(*[(240, 60)] * 6, more=[sharded("Net")]),  # tensor parallelism: DTensors, and nothing averages
    ],
)
def test_counts_that_weigh_no_rank_more_than_another(healthy: Run) -> None:
    assert findings(the_check(mean_of_means), healthy) == []


def test_counts_that_differ_now_here_and_now_there_are_advice() -> None:
    for more in ([], [sharded()]):
        (found,) = findings(the_check(mean_of_means), divided(*[(240, 60), (60, 90)] * 6, more=more))
        assert found.severity is Severity.ADVICE and "2.8 times" in found.notes[0] and "4 times at most" in found.notes[0]


def test_parameters_that_fully_shard_has_put_over_the_ranks() -> None:
    (found,) = findings(the_check(mean_of_means), divided(*[(240, 60), (230, 70)] * 3, ddp=False, weight=9.0, more=[sharded()]))
    assert found.severity is Severity.WARNING and "240, 60" in found.message


def followed(*values: tuple[float, ...], rates: tuple[float, float] = (0.1, 0.1), ranks: int = 2) -> Run:
    """A schedule that is given these values, a column a rank; rank 1's rate is the second."""
    return two_ranks(
        extra=lambda r: [event("scheduler", line=81, kind="ReduceLROnPlateau", metric=v[r], lr=rates[r], s=n) for n, v in enumerate(values)]
        * (r < ranks)
    )


def test_a_schedule_that_follows_a_metric_of_each_ranks_own() -> None:
    (found,) = findings(the_check(lr), followed((0.5, 0.5), (0.4, 0.41)))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 81


@pytest.mark.parametrize("op", ["reduce", "all_reduce"])
@pytest.mark.parametrize("parted", [True, False])
def test_a_metric_that_was_reduced_to_one_rank(op: str, parted: bool) -> None:
    def told(rank: int) -> list[Event]:
        called = event("coll", line=79, op=op, numel=2, dtype="float32", grad=False, s=3)
        return [called, event("scheduler", line=81, kind="ReduceLROnPlateau", metric=(0.1, 0.2)[rank], lr=0.1, s=3)]

    (found,) = findings(the_check(lr), two_ranks(extra=told, each=by_rank(hyper=(10, 11)) if parted else by_rank()))
    assert found.where is not None and found.where.line == 81
    assert any("train.py:79" in note for note in found.notes) == (op == "reduce")
    assert any("0.1, 0.2" in text for text in (found.message, *found.notes))


@pytest.mark.parametrize(
    "healthy",
    [
        followed((0.5, 0.5), (0.4, 0.4 * (1 + 1e-7))),  # summed in another order
        followed((0.5, 0.6), ranks=1),  # one rank decides and tells the others
        followed((0.5, 0.6), rates=(0.1, 0.05)),  # brought into line: the rows' rates agree
        followed((float("nan"), 0.6)),
    ],
)
def test_schedules_that_follow_one_metric_are_healthy(healthy: Run) -> None:
    assert findings(the_check(lr), healthy) == []


@pytest.mark.parametrize(
    "healthy",
    [
        scaled(1 / 1024),  # divided by hand
        scaled(own=False),  # an optimizer that may unscale in its own step
        scaled(local={}, at_step={}),
        lambda rank: [e for e in scaled()(rank) if e.kind != "scaled_step"],  # scaler.step, or unscale_
    ],
)
def test_unscaled_gradients_are_healthy(healthy: Any) -> None:
    assert findings(the_check(scaled_step), two_ranks(extra=healthy)) == []


@pytest.mark.parametrize(
    "healthy",
    [
        mixed(part(52), part(44)),  # two losses before any step
        mixed(part(44, stepped=(1,)), part(44)),  # accumulation of an optimizer that steps less often
        mixed(part(52, stepped=(1,)), part(44, stepped=(2,))),  # heads, and the encoder that both train
        mixed(part(52, stepped=(1,)), part(44), together=True),
        mixed(part(52, num=2, stepped=(1,)), part(44)),  # an auxiliary loss on a part of it
    ],
)
def test_gradients_of_several_backwards_on_purpose_are_healthy(healthy: Run) -> None:
    assert findings(the_check(mixed_step), healthy) == []


@pytest.mark.parametrize(
    "healthy",
    [
        one_cycle(15),  # len(loader)
        one_cycle(150),  # of ten times as many epochs
        one_cycle(27, exits=("break",)),  # cut by max_steps
        one_cycle(27, code=1),
        one_cycle(27, resumed=True),  # the second half
        replace(one_cycle(27), over=True),  # the first half: another session follows
        one_cycle(3),  # stepped by epoch, by its length
    ],
)
def test_a_schedule_that_was_made_for_another_run_is_healthy(healthy: Run) -> None:
    assert findings(the_check(long_schedule), healthy) == []


def test_half_of_the_planned_epochs_are_advice_at_most() -> None:
    found = findings(the_check(long_schedule), one_cycle(30, samples=100, asked=1))
    assert [f.severity for f in found] == [Severity.ADVICE]


@pytest.mark.parametrize("loss", [{"scaled": True}, {"reduction": "sum"}])
def test_an_accumulated_loss_with_a_factor_is_healthy(loss: dict[str, Any]) -> None:
    assert findings(the_check(accumulation), two_ranks(extra=accumulated(4, **loss))) == []


def test_gradients_scaled_before_the_step_count_as_a_factor() -> None:
    scaled = two_ranks(extra=lambda r: [*accumulated(4)(r), event("gradients", opt=0, local={"0": [4.0]}, at_step={"0": [1.0]})])
    assert findings(the_check(accumulation), scaled) == []


def test_several_losses_of_one_batch_are_no_accumulation() -> None:
    """A loop over tasks: every backward takes all 8 samples that the loader gave. Halves of a batch are micro-batches."""

    def looped(rows: int) -> list[Finding]:
        site_at = site(30)
        told = [event("loss", line=30, **LOSS), *[event("accumulation", line=30, opt=0, s=s, sites=[[site_at, 2]], rows=rows) for s in range(6)]]
        return findings(the_check(accumulation), two_ranks(extra=lambda r: told))

    assert looped(8) == [] and [f.code for f in looped(4)] == ["OPT108"]


def test_a_norm_that_is_only_logged_is_not_clipped() -> None:
    read = [event("clip", line=48, scaled=True, scale=65536.0, norm=5e4, max_norm=math.inf)]
    assert findings(the_check(clip_scaled), two_ranks(extra=lambda r: read)) == []


def test_one_step_a_epoch_of_the_scheduler_is_healthy() -> None:
    once = two_ranks(extra=lambda r: [event("scheduler", line=46, id=1, s=s) for s in range(1, 8)])
    assert findings(the_check(scheduler), once) == []


@pytest.mark.parametrize(("backwards", "total", "severities"), [(1, 12, [Severity.WARNING]), (1, 24, [Severity.ADVICE]), (2, 24, [])])
def test_a_scheduler_stepped_for_each_rank(backwards: int, total: int, severities: list[Severity]) -> None:
    """12 steps: a schedule of 24 counts those of both ranks; two backwards a step are micro-batches."""
    told = [event("scheduler_made", line=20, id=1, totals=[total]), *[event("scheduler", line=46, id=1, s=s) for s in range(1, 8) for _ in (0, 1)]]
    made = two_ranks(each=lambda r, s: {"num_backward": backwards}, extra=lambda r: told)
    assert [f.severity for f in findings(the_check(scheduler), made)] == severities


def test_gradients_in_parts_pile_up_too() -> None:
    """A DTensor's gradient has no digest in the row: elsewhere that is the mark of a closure, which zeroes inside the step."""

    def piled(sharded: bool, zeroed: int = 0) -> list[str]:
        made = two_ranks(ddp=False, each=lambda r, s: {"grad": 0, "flags": FLAG_CHANGED | zeroed}, setup_of=lambda r: setup(r, ddp=False, sharded=sharded))
        return [f.code for f in findings(the_check(zero_grad), made)]

    assert piled(True) == ["OPT102"] and piled(False) == piled(True, FLAG_ZEROED) == []


def by_micro_batch(total: int, zero_from: int = 99) -> list[str]:
    """12 steps of four backwards each, the scheduler stepped at each of them."""
    told = [event("scheduler_made", line=20, id=1, totals=[total] if total else [])]
    told += [event("scheduler", line=46, id=1, s=s) for s in range(1, 12) for _ in range(4)]
    made = two_ranks(each=lambda r, s: {"num_backward": 4, "lr": 0.0 if s >= zero_from else 0.1}, extra=lambda r: told)
    return [f.message for f in findings(the_check(scheduler), made)]


def test_a_schedule_for_steps_that_is_stepped_at_each_micro_batch() -> None:
    (by_length,), (by_rate,) = by_micro_batch(12), by_micro_batch(0, zero_from=4)
    assert "4 times an optimizer step, once for each micro-batch" in by_length and by_rate == by_length
    assert by_micro_batch(48) == by_micro_batch(0) == by_micro_batch(0, zero_from=11) == []  # counted in micro-batches; not known; its last step
    assert by_micro_batch(3) == []  # a cycle that starts anew


def test_a_first_step_without_zeroing_is_healthy() -> None:
    healthy = two_ranks(each=lambda r, s: {"grad": 5, "flags": FLAG_CHANGED | (FLAG_ZEROED if s else 0)})
    assert findings(the_check(zero_grad), healthy) == []


def thrown_away(*, no_sync: int = 3, scaled: bool = True, at_step: float = 0.5, steps: int = 8) -> Run:
    """Four backwards of line 30 a step; those before the last were cleared by line 28."""
    dropped = [[site(30), 3, no_sync, site(28)]]
    return two_ranks(
        extra=lambda r: [
            event("loss", line=30, scaled=scaled),
            event("gradients", opt=0, s=0, local={"0": [1.0, 2.0]}, at_step={"0": [at_step, 1.0]}),
            *(event("accumulation", line=30, opt=0, s=s, sites=[[site(30), 1]], dropped=dropped if s < steps else []) for s in range(8)),
        ]
    )


def test_micro_batches_thrown_away() -> None:
    (found,) = findings(the_check(cleared), thrown_away())
    assert found.where is not None and found.where.line == 28 and found.severity is Severity.ERROR and found.message.startswith("3 of 4 backwards")
    assert [f.severity for f in findings(the_check(cleared), thrown_away(no_sync=0, scaled=False))] == [Severity.ADVICE]
    assert findings(the_check(cleared), thrown_away(at_step=-1.0)) == []  # put together by the script from all of them
    assert findings(the_check(cleared), thrown_away(steps=2)) == []  # skipped now and then


def scheduled(*, beside: tuple[int, ...] = (1,) * 6, lr: float = 0.0, own: int = 0, rests: bool = True) -> Run:
    """Optimizer 1 steps the parameters of optimizer 0, whose scheduler goes on."""

    def events(rank: int) -> list[Event]:
        told = [event("scheduler", line=46, id=1, opt=0, lr=0.1 - 0.01 * n, t=2 * 10**9 + n) for n in range(6)]
        told += [event("scheduler", line=47, id=2, opt=1, lr=0.1, t=2 * 10**9 + n) for n in range(own)]
        idle = [
            event("schedule_idle", line=46, kind="StepLR", id=1, beside=b, lr=0.1, made=site(40), t=2 * 10**9 + n) for n, b in enumerate(beside)
        ]
        return [event("params", line=24, opt=1, kind="AdamW", names=NAMES), *told, *idle]

    return two_ranks(
        extra=events,
        each=lambda r, s: {"opt": int(s < 11 or rests), "t_ns": 2 * 10**9 + 10 * s, "lr": 0.002 + lr * s},
    )


def test_a_schedule_of_an_optimizer_that_rests() -> None:
    (found,) = findings(the_check(idle_schedule), scheduled())
    assert found.where is not None and found.where.line == 24 and "the StepLR drives" in found.message and "AdamW" in found.message


@pytest.mark.parametrize("told", [{"beside": (1, 1)}, {"lr": 0.1}, {"own": 3}, {"rests": False}, {"beside": ()}])
def test_schedules_that_only_rest_for_a_while_or_have_a_successor(told: dict[str, Any]) -> None:
    assert findings(the_check(idle_schedule), scheduled(**told)) == []


@pytest.mark.parametrize(
    "healthy",
    [
        two_ranks(each=nothing_from(6)),  # frozen: the loss reaches nothing else
        two_ranks(each=nothing_from(6), extra=lambda r: [*left_in()(r), unstepped_event(11, num=0)]),  # an optimizer was made for them
        two_ranks(each=lambda r, s: {"grad": 50 + s}, extra=left_in()),  # gradients set by hand, as in meta-learning
        two_ranks(each=nothing_from(6), extra=left_in(opts=4)),  # the loss reaches them, the script clears the gradients
    ],
)
def test_an_optimizer_that_is_not_left_behind(healthy: Run) -> None:
    assert findings(the_check(stale), healthy) == []


@pytest.mark.parametrize(
    "told",
    [
        [unstepped_event(8, why="listed", looks=1)],  # an optimizer took them soon
        [unstepped_event(8, numel=400)],  # a probe on a backbone that was not frozen
        [unstepped_event(8), unstepped_event(9, num=0)],  # a second optimizer, made later
        [unstepped_event(8, looks=1)],
        [unstepped_event(8, why="")],  # a model of its own
    ],
)
def test_parameters_that_are_left_out_on_purpose(told: list[Event]) -> None:
    assert findings(the_check(unstepped), two_ranks(extra=lambda r: told)) == []


def test_a_part_that_is_left_out_as_a_whole_is_advice() -> None:
    found = findings(the_check(unstepped), two_ranks(extra=lambda r: [unstepped_event(8, why="part")]))
    assert [f.severity for f in found] == [Severity.ADVICE]


def test_a_sum_that_joins_the_ranks_by_a_collective_is_not_judged() -> None:
    assert findings(the_check(sum_loss), two_ranks(extra=accumulated(1, reduction="sum", joined=True))) == []


def test_members_of_a_population_have_their_own_rates() -> None:
    members = two_ranks(ddp=False, each=by_rank(hyper=(10, 11), lr=(0.1, 0.2), grad=(5, 6), param=(8, 9)))
    assert findings(the_check(lr), members) == []


def never(*, steps: int = 0, graded: int = 4, live: bool = False, code: int = 0) -> list[Finding]:
    told = [event("not_stepped", line=31, made=site(20), kind="Adam", backwards=n, graded=graded) for n in (8, 16, 32)]
    made = run([recording(told, [row(s) for s in range(steps)], rank=r) for r in (0, 1)], exits=(code, code), live=live)
    _, found = judge(made, select=("OPT128",))
    return list(found)


def test_an_optimizer_that_is_never_stepped() -> None:
    (found,) = never()
    assert found.where is not None and found.where.line == 20 and "32 backwards" in found.message and "train.py:31" in found.notes[1]


def test_gradients_that_wait_or_are_wanted_for_themselves_are_healthy() -> None:
    assert never(steps=1) == [] and never(graded=0) == [] and never(live=True) == [] and never(code=1) == []


def test_a_copy_whose_gradients_are_never_zeroed() -> None:
    lent = event("lent_kept", line=40, s=4, num=4, of=4, opt=0, zeroed=site(38))
    found = findings(the_check(zero_grad), two_ranks(each=by_rank(flags=(FLAG_CHANGED | FLAG_ZEROED,) * 2), extra=lambda r: [lent]))
    assert [(f.code, f.where and f.where.line, f.ranks) for f in found] == [("OPT102", 38, (0, 1))]
    assert "4 of the copy's 4" in found[0].message


@pytest.mark.parametrize(("norms", "accumulated", "opts", "fires"), [
    ((3.0, 2.0), (1, 2), 1, True),
    ((0.3, 0.2), (1, 2), 1, False),  # nothing was clipped
    ((3.0, 2.0), (1, 1), 1, False),  # by sample: zero again in between
    ((3.0,), (2,), 1, False),  # once, after all
    ((3.0, 2.0), (2, 2), 1, False),  # two calls after one backward
    ((3.0, 2.0), (1, 2), 2, False),  # a GAN's two models in one helper
])  # fmt: skip
def test_gradients_that_are_clipped_while_they_are_accumulated(norms: tuple[float, ...], accumulated: tuple[int, ...], opts: int, fires: bool) -> None:
    clips = [
        event("clip", line=61, s=s, norm=n, max_norm=1.0, accumulated=a, no_sync=True) for s in range(4) for n, a in zip(norms, accumulated, strict=True)
    ]
    found = findings(clipped_between.ClippedWhileAccumulating, run([recording(clips, [row(s, opt=s % opts) for s in range(4)])]))
    assert len(found) == fires
    if fires:
        assert found[0].where is not None and found[0].where.line == 61 and "no_sync" in found[0].message


@pytest.mark.parametrize(("collectives", "line"), [(0, 72), (3, 76)])
def test_a_scaler_that_looks_for_inf_before_the_gradients_are_averaged(collectives: int, line: int) -> None:
    def extra(rank: int) -> list[Event]:
        told = [event("unscaled", line=72, s=s, collectives=collectives, reduced=0) for s in range(4)]
        return [event("scaler_made", scale=8.0, enabled=True, line=40), event("scaler", scale=8.0, enabled=True, line=76), *told]

    of = two_ranks(ddp=False, extra=extra, each=lambda rank, s: {"num_coll": 3, "scale": 8.0 if s < 6 or rank else 4.0})
    (found,) = findings(scaler.ScalerDiverges, of)
    assert found.where is not None and found.where.line == line and bool(found.notes) == (line == 72)


@pytest.mark.parametrize(("own", "at_step", "given", "fires"), [
    ((11, 12), (5, 5), False, True),
    ((11, 11), (5, 5), False, False),  # averaged before they are unscaled
    ((11, 12), (5, 6), False, False),  # no replicas: a part of the model each
    ((11, 12), (5, 5), True, False),  # the script has the ranks agree on a scale
])  # fmt: skip
def test_a_scaler_that_looks_for_inf_alone_before_there_is_any(own: tuple[int, int], at_step: tuple[int, int], given: bool, fires: bool) -> None:
    def extra(rank: int) -> list[Event]:
        told = [event("unscaled_grads", line=72, s=s, grad=own[rank] + s) for s in range(4)]
        return [event("scaler", scale=8.0, enabled=True, line=76, given=given), *told]

    found = findings(scaler.ScalerDiverges, two_ranks(ddp=False, extra=extra, each=lambda rank, s: {"scale": 8.0, "grad": at_step[rank] + s}))
    assert [(f.severity, f.where.line) for f in found if f.where] == ([(Severity.WARNING, 72)] if fires else [])


def clips(*, backwards: int, zeroed: int = FLAG_ZEROED, next_backwards: int = 1, limit: float = 1.0) -> list[str]:
    """A clip in front of each of 12 steps; `backwards` since the step before, `next_backwards` until the next one."""
    told = [event("clip", line=48, norm=1.0, max_norm=limit, backwards=backwards, s=s) for s in range(1, 12)]
    made = two_ranks(each=lambda r, s: {"num_backward": next_backwards, "flags": FLAG_CHANGED | zeroed}, extra=lambda r: told)
    return [f.message for f in findings(CHECKS["OPT129"], made)]


def test_gradients_that_are_clipped_behind_their_step() -> None:
    (message,) = clips(backwards=0)
    assert "the clip has no effect" in message


@pytest.mark.parametrize("inside", [True, False])
def test_a_clip_behind_steps_that_hooks_take(inside: bool) -> None:
    told = [event("clip", line=48, norm=1.0, max_norm=1.0, backwards=0, stepped_inside=inside, s=s) for s in (*range(1, 12), 40)]
    made = two_ranks(each=lambda r, s: {"num_backward": 1, "flags": FLAG_CHANGED | FLAG_ZEROED}, extra=lambda r: told)
    (found,) = findings(CHECKS["OPT129"], made)
    assert ("by hooks: clip there" in found.help) is inside
    assert found.notes == ("11 of the 11 clips of rank 0 that were looked at came behind the step, no backward in between",)


def test_clips_that_have_an_effect() -> None:
    assert clips(backwards=1) == []
    assert clips(backwards=0, next_backwards=0) == []  # another optimizer stepped in between
    assert clips(backwards=0, zeroed=0) == []  # the clipped gradients are added to
    assert clips(backwards=0, limit=math.inf) == []


def test_a_freeze_that_nobody_reads() -> None:
    told = [event("misspelt", line=37, attribute="require_grad", of="parameter", names=["0.weight"], num=4)]
    (found,) = findings(CHECKS["OPT130"], two_ranks(extra=lambda r: told))
    assert found.where is not None and found.where.line == 37 and "`require_grad = False` freezes nothing: 4 parameters" in found.message
    assert findings(CHECKS["OPT130"], two_ranks()) == []


@pytest.mark.parametrize(("nothing", "severity"), [
    (("used up",) * 4, Severity.WARNING),
    (("", "used up", "used up", "used up"), Severity.WARNING),  # the first clip drew from it
    (("empty",) * 4, Severity.ADVICE),
    (("",) * 4, None),
    (("", "empty", "", "empty"), None),  # groups of parameters, one without any
    (("", "", "", "used up"), None),
])  # fmt: skip
def test_a_clip_that_is_given_nothing(nothing: tuple[str, ...], severity: Severity | None) -> None:
    told = [event("clip", line=48, norm=0.0, max_norm=1.0, nothing=n, s=s) for s, n in enumerate(nothing)]
    found = findings(CHECKS["OPT133"], run([recording(told, [row(s) for s in range(6)])]))
    assert [f.severity for f in found] == ([] if severity is None else [severity])


def test_a_clip_of_the_scripts_own_while_scaled() -> None:
    told = event("scaled_clip", line=61, wrote={"file": "/home/u/train.py", "line": 25, "func": "clip_", "text": "p.grad.copy_(x)"}, scale=4096.0, shrunk=6, of=6)
    (found,) = findings(CHECKS["OPT110"], two_ranks(extra=lambda rank: [told]))
    assert found.where is not None and found.where.line == 61 and found.severity is Severity.ERROR and "line 25 writes them" in found.notes


# ---- OPT134 ----
def test_an_average_that_outruns_the_steps() -> None:
    told = event("average_idle", line=96, module="Net", made=site(40), windows=6, moves=4, idle=3, backwards=4)
    (found,) = findings(CHECKS["OPT134"], two_ranks(extra=lambda rank: [told]))
    assert found.where is not None and found.where.line == 96 and found.severity is Severity.WARNING and found.ranks == (0, 1)
    assert "moves 4 times for each optimizer step, 3 of them" in found.message
    assert findings(CHECKS["OPT134"], two_ranks()) == []


# ---- OPT136: the squared norm of averaged gradients, summed over the ranks ----
NORMS = (0.9, 0.7, 0.8, 0.3, 0.6)


def squares(limit: float, *, times: float = 2.0, seen: float = 2.0, part: float = 0.0, clips: bool = True, given: float | None = None) -> Any:
    """Two ranks whose script puts the squared norms into one sum, `times` of a rank's, and clips by the root of `seen` times the square."""

    def events(rank: int) -> list[Any]:
        told = []
        for step, norm in enumerate(NORMS):
            own = norm**2 * (1 + part * rank)
            factor = min(1.0, limit / (norm * seen**0.5)) if clips else 1.0
            told.append(event("grad_square", s=step, line=53, got=times * norm**2, own=own, left=own * factor**2))
            told += [event("clip", s=step, line=57, max_norm=given)] if given is not None else []
        return [*setup(rank), *told]

    return run([recording(events(r), [row(s) for s in range(8)], rank=r) for r in range(2)])


def test_the_square_of_averaged_gradients_is_summed() -> None:
    (found,) = findings(square_summed.SquareSummed, squares(0.25))
    assert (found.code, found.where and found.where.line, found.ranks) == ("OPT136", 53, (0, 1))
    assert "clipped to 0.1768 where the limit is 0.25" in found.notes[1]
    assert findings(square_summed.SquareSummed, squares(0.25, given=5.0))  # a second clip that does nothing


def test_sums_of_squares_that_are_right() -> None:
    silent = [
        squares(0.25, seen=1.0),  # the sum is divided by the ranks before it is used, or another function clips
        squares(0.25, clips=False),  # it is shown, and clips nothing
        squares(5.0),  # a limit that no gradient comes to
        squares(0.25, part=0.01),  # shards: each rank has other parameters
        squares(0.25, times=1.0, seen=1.0),  # each rank gives its share of the mean
        squares(0.25, given=0.25 / 2**0.5),  # torch's clip makes its own norm; its limit falls with the root of the ranks, the sum is for the log
        squares(0.25 * 2**0.5),  # a limit that nobody types: something else is multiplied in
    ]
    assert [findings(square_summed.SquareSummed, one) for one in silent] == [[]] * len(silent)


# ---- OPT111: a state dict put back on some ranks ----
def put_back(*ranks: int, step: int = 6, error: str = "") -> Run:
    return two_ranks(
        each=lambda r, s: {"param": 100 + s + r * (s > 5)},
        extra=lambda r: [event("load_state", line=65, s=step, error=error)] if r in ranks else [],
    )


def test_a_state_dict_that_one_rank_puts_back() -> None:
    (found,) = findings(the_check(edited), put_back(0))
    assert "rank 0 puts a state dict back into the model at step 6" in found.message and found.where is not None and found.where.line == 65
    for other in (put_back(0, 1), put_back(0, step=3), put_back(0, error="size mismatch")):
        (found,) = findings(the_check(edited), other)
        assert "although gradients and hyper-parameters agree" in found.message
