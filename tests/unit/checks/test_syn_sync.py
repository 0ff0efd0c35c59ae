"""SYN: what a hand-written sync leaves out, and who trains alone on purpose."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from builder import event, findings, recording, row, run, site
from replica_runs import setup, two_ranks

from harness.checks.base import Check, NotApplicable
from harness.checks.registry import all_checks
from harness.checks.syn import pairing
from harness.model import Severity
from harness.probe import protocol
from harness.record import Event, Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}


def coll(op: str, line: int | None, *, s: int = 1, numel: int = 1, **fields: Any) -> Event:
    told = {"op": op, "numel": numel, "dtype": "float32", "n": 0, "grad": False, "world": True, "names": []}
    return event("coll", line=line, s=s, **(told | fields))


def sparse_tables(*, synced: bool = True, differ: bool = True, local: bool = False) -> Run:
    """A dense optimizer that is synchronised, and one of sparse embeddings, at every other step, whose gradients are hashed and never sampled."""
    recordings = []
    for rank in (0, 1):
        told = {"numels": [4, 16, 4, 16], "ddp": [-1] * 4, "owned": [True] * 4, "requires_grad": [True] * 4}
        events = [*setup(rank, ddp=False), event("params", opt=1, kind="SparseAdam", names=["item", "user", "a", "b"], **told), event("initial", opt=1, each=[1, 2, 3, 4])]
        events += [event("gradients", s=s, opt=0, names={"0": "0.bias"}, local={"0": [1.0 + rank]}, at_step={"0": [1.5 if synced else 1.0 + rank]}) for s in (0, 2)]
        events += [event("gradients", s=s, opt=1, names={"0": "item"} if local else {}, local={"0": [1.0]} if local else {}, at_step={}) for s in (1, 3)]
        events += [coll("all_reduce", 51, s=s, numel=16, grad=True) for s in range(0, 8, 2)]
        apart = rank if differ else 0
        rows = [row(s, opt=s % 2, grad=9 + s + 100 * apart * (s % 2), param=9 + s + 100 * apart * (s % 2), num_backward=1) for s in range(8)]
        made = recording(events, rows, rank=rank, world_size=2)
        blob = b""
        for s in range(8):
            value = 10 + s + 100 * apart * (s % 2)
            blob += protocol.DETAIL.pack(s, s % 2, 4) + struct.pack("<8I", *[value] * 8)
        made.params = blob
        recordings.append(made)
    return run(recordings)


@pytest.mark.parametrize(("told", "fires"), [
    ({}, True),
    ({"differ": False}, False),
    ({"synced": False}, False),  # nothing is synchronised: another finding
    ({"local": True}, False),  # sampled: the samples tell
])  # fmt: skip
def test_gradients_that_are_only_hashed_are_left_out_of_a_sync(told: dict[str, bool], fires: bool) -> None:
    found = findings(CHECKS["SYN128"], sparse_tables(**told))
    assert len(found) == fires
    if fires:
        assert "item" in found[0].message and found[0].where is not None and found[0].where.line == 51


def counted(sizes: tuple[list[tuple[int, bool]], list[tuple[int, bool]]], **ending: Any) -> Run:
    """(numel, is a gradient) of each rank's reductions at step 1."""
    return two_ranks(ddp=False, extra=lambda r: [coll("all_reduce", 43, s=1, numel=n, grad=g) for n, g in sizes[r]], **ending)


def test_a_reduction_is_a_skipped_gradient_only_where_the_ranks_collectives_do_not_fit() -> None:
    metric = ([(1, False), (1, True), (80, True)], [(1, False), (1, False), (80, True)])  # one rank's counter lies where a gradient lay
    assert findings(CHECKS["SYN118"], counted(metric)) == []
    assert len(findings(CHECKS["SYN118"], counted(([(16, True), (80, True)], [(80, True)])))) == 1


def test_the_step_in_work_of_a_live_run_is_not_judged() -> None:
    def of(step: int) -> list[Event]:
        return [coll("all_reduce", 43, s=step, numel=n, grad=True) for n in (16, 80)]

    for step, fires in ((12, 0), (11, 1)):
        part = two_ranks(ddp=False, extra=lambda r, step=step: of(step)[r:], live=True)
        assert len(findings(CHECKS["SYN118"], part)) == fires


def test_a_step_whose_calls_are_not_all_told_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first calls of a process are: a rank that called for a metric too has told of fewer gradients."""
    told = ([(2, 1, False), (5, 16, True), (5, 80, True)], [(5, 16, True), (5, 80, True), (6, 16, True)])
    for most, fires in ((3000, 1), (3, 0)):
        monkeypatch.setattr(pairing, "MAX_EVENTS", most)
        part = two_ranks(ddp=False, extra=lambda r: [coll("all_reduce", 43, s=s, numel=n, grad=g) for s, n, g in told[r]])
        assert len(findings(CHECKS["SYN118"], part)) == fires


def test_a_rank_that_was_killed_between_two_reductions_skipped_no_gradient() -> None:
    """It is the last step that is short, and its own end is the cause; what lies before that is judged."""

    def broken(at: int, op: str = "barrier", **ending: Any) -> Run:
        def told(rank: int) -> list[Event]:
            call, line = ("all_reduce", 43) if rank == 0 else (op, 50)
            stall = event("stall", t=1 << 60, phase="train", op=call, site=site(line), stack=[site(line)])
            return [*(coll("all_reduce", 43, s=at, numel=n, grad=True) for n in ((16, 80), (16,))[rank]), stall]

        return two_ranks(ddp=False, extra=told, **ending)

    for code in (-9, 7):
        ended = {"exits": (1, code), "logs": {0: "RuntimeError: Connection closed by peer"}}
        assert [len(findings(CHECKS["SYN118"], broken(at, **ended))) for at in (12, 11)] == [0, 1]
    assert len(findings(CHECKS["SYN118"], broken(12, exits=(-6, 0)))) == 1  # gloo aborts where the sizes do not fit
    hung: dict[str, Any] = {"exits": (-9, -9), "reason": "hang"}
    assert findings(CHECKS["SYN118"], broken(12, "", **hung)) == []  # it is stuck in code of its own
    assert len(findings(CHECKS["SYN118"], broken(12, "barrier", **hung))) == 1



def local_sgd(
    *, steps: int = 48, start: int = 12, period: int | None = 4, warmup: int = 12, average: str = "", hook: bool = True,
    first: int | None = None, hook_start: int | None = None, **ending: Any
) -> Run:
    """Parameters differ from `start` on; the averager's own calls, a reduction of every parameter, or none."""
    def extra(r: int) -> list[Event]:
        told = [event("comm_hook", line=32, name="post_localSGD_hook", start=hook_start or start)] if hook else []
        told += [coll("all_reduce", 70, s=s, numel=40, hook=True, world=False) for s in range(steps)]
        told += [coll("all_reduce", 75, s=s, numel=2) for s in range(12, steps, 12)]
        if period:
            told += [event("model_averager", line=33), event("averager_called", line=37, s=1, period=period, warmup=warmup)]
        if average == "flat":
            told += [coll("all_reduce", 37, s=s, numel=40) for s in range((start if first is None else first) + 1, steps, period or 4)]
        if average == "each":
            told += [coll("all_reduce", 60, s=steps, numel=n, world=False) for n in (4, 16, 4, 16)]
        return told

    return two_ranks(steps=steps, extra=extra, each=lambda r, s: {"param": 100 + s + 1000 * r * (s >= start), "grad": 5 + r * (s >= start)}, **ending)


@pytest.mark.parametrize(("told", "line"), [
    ({"warmup": 100}, 33),  # the warm-up lies behind the end
    ({"warmup": 100, "hook": False}, 33),
    ({}, 37),  # called, and averages nothing: a group of one, parameters of another model
    ({"period": None}, 32),  # the hook alone: nobody averages
    ({"average": "flat"}, None),
    ({"average": "flat", "warmup": 100}, None),  # somebody else does it
    ({"average": "each"}, None),  # once, at the end
    ({"period": 40}, None),  # not due yet
    ({"start": 48}, None),  # never parted: a trial shorter than the warm-up
    ({"start": 40, "period": None}, None),  # a few local steps
    ({"period": None, "exits": (0, 1)}, None),
    ({"period": None, "hook": False}, None),  # no local SGD
])  # fmt: skip
def test_local_sgd_that_never_averages(told: dict[str, Any], line: int | None) -> None:
    found = findings(CHECKS["SYN134"], local_sgd(**told))
    assert [f.where.line for f in found if f.where] == ([line] if line else [])


@pytest.mark.parametrize(("told", "fires"), [
    ({"warmup": 36, "first": 36}, True),
    ({"warmup": 36, "first": 36, "hook": False}, True),
    ({"warmup": 20, "first": 20}, False),  # two periods
    ({"warmup": 21, "first": 21}, True),
    ({"warmup": 36, "first": 13}, False),  # somebody averages meanwhile
    ({"warmup": 36, "first": 36, "hook_start": 36}, False),  # what parted before is nothing of local SGD's
    ({"warmup": 12, "first": 36}, False),  # an average of the script's own, late by choice
])  # fmt: skip
def test_a_warm_up_that_goes_on_after_local_sgd_has_begun(told: dict[str, Any], fires: bool) -> None:
    late = local_sgd(average="flat", **told)
    found = findings(CHECKS["SYN134"], late)
    assert [(f.severity, f.where.line if f.where else 0) for f in found] == ([(Severity.WARNING, 33)] if fires else [])
    assert not fires or f"part at step 12 and are first averaged at step {told['first']}" in found[0].message


SAMPLER = event("loader", distributed={"num_replicas": 2, "rank": 0})


@pytest.mark.parametrize(("differ", "loaders", "severity"), [
    ({"hyper": (7, 8), "batch": (3, 4)}, [], Severity.ADVICE),  # a search: a learning rate a rank
    ({"batch": (3, 3)}, [], Severity.ADVICE),  # a search: another dropout, the same data
    ({"batch": (3, 4)}, [], Severity.ERROR),  # shares that the script cut itself
    ({"batch": (0, 0)}, [], Severity.ERROR),  # tensors in memory: nobody knows
    ({"hyper": (7, 8)}, [SAMPLER], Severity.ERROR),
    ({"batch": (3, 3)}, [SAMPLER], Severity.ERROR),
])  # fmt: skip
def test_a_search_by_rank_is_told_from_a_forgotten_wrap(differ: dict[str, tuple[int, int]], loaders: list[Event], severity: Severity) -> None:
    apart = two_ranks(
        ddp=False, extra=lambda r: loaders, each=lambda r, s: {"grad": 5 + r, "param": 10 * s + r, **{k: v[r] for k, v in differ.items()}}
    )
    assert [f.severity for f in findings(CHECKS["SYN126"], apart)] == [severity]


def test_a_rate_that_parts_later_is_no_search() -> None:
    late = two_ranks(ddp=False, each=lambda r, s: {"grad": 5 + r, "param": 10 * s + r, "hyper": 1 + r * (s > 4), "batch": 3 + r})
    assert [f.severity for f in findings(CHECKS["SYN126"], late)] == [Severity.ERROR]


@pytest.mark.parametrize("hashed", [12, 4])
def test_steps_that_were_not_hashed_neither_agree_nor_differ(hashed: int) -> None:
    """Device tensors are read at the first 16 steps and every 16th after, all others at the first 256."""
    apart = two_ranks(ddp=False, each=lambda r, s: {"grad": 5 + r, "param": 10 * s + r + 1, "batch": 3 + r} if s < hashed else {"grad": 0, "param": 0, "full": 0})
    (found,) = findings(CHECKS["SYN126"], apart)
    assert f"all of {hashed} steps" in found.notes[0]


def test_rounds_that_are_longer_than_what_is_hashed_are_averaged_all_the_same() -> None:
    def trained(at: int) -> Run:
        unhashed = {"grad": 0, "param": 0, "full": 0}
        return two_ranks(ddp=False, steps=30, extra=lambda r: [coll("all_reduce", 41, s=at, numel=40)],
                         each=lambda r, s: {"grad": 5 + r, "param": 10 * s + r + 1, "batch": 3 + r} if s < 8 else unhashed)  # fmt: skip

    assert findings(CHECKS["SYN126"], trained(20)) == findings(CHECKS["SYN130"], trained(20)) == []


def shared_out(*calls: tuple[str, int], grad: int = 1, seq: int = 1, world: bool = True, params: int = 0) -> Run:
    """Gradients differ and parameters agree; each step broadcasts the weights and issues `calls`, `seq` times as many as are told."""
    def extra(r: int) -> list[Event]:
        return [coll(op, 60, s=s, numel=n, world=world) for s in range(12) for op, n in (("broadcast", 40), *calls)]

    num = 1 + len(calls)
    return two_ranks(ddp=False, extra=extra, each=lambda r, s: {"grad": 5 + grad * r, "param": 100 + s + params * r, "num_coll": num, "seq": seq * num * s + num})


@pytest.mark.parametrize(("told", "fires"), [
    (shared_out(), True),
    (shared_out(("all_reduce", 3)), True),  # losses
    (shared_out(grad=0), False),  # averaged before the step
    (shared_out(params=1), False),  # the weights differ: another finding
    (shared_out(("reduce_scatter_tensor", 40)), False),  # by hand: each owner has its share of the sum
    (shared_out(("reduce", 40)), False),
    (shared_out(("all_gather", 40)), False),
    (shared_out(("gather", 40)), False),  # one rank adds up, steps, and sends the weights
    (shared_out(("gather_object", -1)), False),
    (shared_out(("isend", 40)), False),
    (shared_out(world=False), False),
    (shared_out(seq=2), False),  # collectives that the probe does not see
])  # fmt: skip
def test_a_sharded_update_without_a_gradient_average(told: Run, fires: bool) -> None:
    found = findings(CHECKS["SYN135"], told)
    assert [f.where.line for f in found if f.where] == [22] * fires


def now_and_then(*, every: int = 4, together: bool = False, ddp: bool = False) -> Run:
    """Gradients are averaged by hand at every fourth step; `together`: the parameters are averaged after it as well (local SGD)."""
    def each(rank: int, s: int) -> dict[str, Any]:
        synced = s % every == 0
        return {"grad": 50 + s + (0 if synced else 100 * rank), "param": 300 + s + (0 if together and synced else 100 * rank * (s > 0))}

    return two_ranks(ddp=ddp, each=each, extra=lambda r: [coll("all_reduce", 51, s=s, numel=16, grad=True) for s in range(0, 12, every)])


def test_gradients_that_are_averaged_at_some_steps_only() -> None:
    (found,) = findings(CHECKS["SYN137"], now_and_then())
    assert "at 3 of 12 steps" in found.message and found.where is not None and found.where.line == 51
    assert findings(CHECKS["SYN137"], now_and_then(together=True)) == []  # local SGD: the parameters come together again
    assert findings(CHECKS["SYN137"], now_and_then(every=1)) == []
    assert findings(CHECKS["SYN137"], now_and_then(every=12)) == []  # one averaging at the start of a rank's own training


def gathered(**fields: Any) -> Run:
    return two_ranks(extra=lambda r: [coll("all_gather", 33, numel=8, **fields), coll("all_gather", 34, numel=8)])


def test_a_list_that_holds_one_tensor_several_times() -> None:
    (found,) = findings(CHECKS["SYN136"], gathered(aliased=True))
    assert found.where is not None and found.where.line == 33 and found.notes == ("2 of 4 calls",)
    assert findings(CHECKS["SYN136"], gathered()) == findings(CHECKS["SYN136"], gathered(aliased=None)) == []


def clipped(ranks: tuple[int, ...], *, limit: float = 1.0, apart: bool = True) -> Run:
    def each(rank: int, s: int) -> dict[str, Any]:
        return {"grad_norm": 2.5 if rank in ranks else float("nan"), "grad": 50 + s + 100 * rank * apart}

    return two_ranks(each=each, extra=lambda r: [event("clip", line=57, s=0, norm=2.5, max_norm=limit)] if r in ranks else [])


def test_clipping_on_one_rank_only() -> None:
    (found,) = findings(CHECKS["SYN138"], clipped((0,)))
    assert found.ranks == (0,) and found.where is not None and found.where.line == 57
    for healthy in (clipped((0, 1)), clipped((0,), apart=False)):  # on all; a norm that was never above the limit
        assert findings(CHECKS["SYN138"], healthy) == []
    with pytest.raises(NotApplicable):  # a norm that rank 0 reads for its log
        list(CHECKS["SYN138"]().end(clipped((0,), limit=float("inf"))))


def target(first: tuple[int, int], last: tuple[int, int], *, called: bool = True, measured: Any = None) -> Run:
    def told(r: int) -> list[Event]:
        one = {"module": "Linear", "num": 2, "first": first[r], "digest": last[r], "called": called, "grad": False, "names": ["weight"]}
        evaluations = [event("evaluated", line=90, module="Net", weights=[["Net", 1], ["Linear", w]], inputs=i) for w, i in (measured[r] if measured else ())]
        return [event("others", models=[one]), *evaluations]

    return two_ranks(extra=told)


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [((5, 5), (6, 5), "updated on rank 0 only"), ((5, 5), (6, 7), "each rank updates it"), ((5, 8), (5, 8), "other weights on other ranks"), ((0, 0), (6, 5), "other weights")],
)
def test_a_frozen_model_that_was_equal_at_first_was_moved(first: tuple[int, int], last: tuple[int, int], says: str) -> None:
    (found,) = findings(CHECKS["SYN115"], target(first, last))
    assert says in found.message
    assert findings(CHECKS["SYN115"], target((5, 5), (6, 6))) == []


def test_an_average_that_all_ranks_measure_with() -> None:
    apart = {"first": (5, 5), "last": (6, 5), "called": False}
    (found,) = findings(CHECKS["SYN115"], target(**apart, measured=[[(6, 1)], [(5, 2)]]))
    assert "updated on rank 0 only" in found.message
    assert findings(CHECKS["SYN115"], target(**apart)) == []  # nobody measures with it
    own = target((4, 5), (4, 5), called=False, measured=[[(4, 1)], [(5, 2)]])
    assert findings(CHECKS["SYN115"], own) == []  # a model of its own on each rank, from the start
    assert findings(CHECKS["SYN115"], target(**apart, measured=[[(6, 1)], []])) == []  # rank 0 alone does
    assert findings(CHECKS["SYN115"], target(**apart, measured=[[(6, 1)], [(5, 1)]])) == []  # all on the same samples: each reads its own
    assert findings(CHECKS["SYN115"], target(**apart, measured=[[(7, 1)], [(7, 2)]])) == []  # sent to all before they measure


def headed(*, alike: bool = False, filled: bool = False, apart: bool = False, flat: bool = False, trunk: bool = False) -> Run:
    """A trunk and two heads of one shape; each rank's batch reaches one head. `filled`: the other head is given zeros before it is reduced; `apart`: the
    zeros are, in a statement of their own."""
    def extra(r: int) -> list[Event]:
        head = "0.bias" if alike or r == 0 else "1.bias"
        told = [event("gradients", s=s, opt=0, names={"0": "0.weight", "1": head}, local={"0": [1.0 + r], "1": [2.0 + r]}, at_step={}) for s in range(4)]
        sizes = [20] if flat else [16, 16] if trunk else [16, 4, 4] if filled or apart else [16, 4]
        known = [True, not (filled or apart) or r == 0, r == 1]  # zeros that the loop has filled in are not known as a gradient
        lines = [65 + 3 * (apart and not k) for k in known]
        return told + [coll("all_reduce", line, s=s, numel=n, grad=k) for s in range(4) for n, k, line in zip(sizes, known, lines, strict=False)]

    return two_ranks(ddp=False, extra=extra)


def test_gradients_of_two_heads_that_meet_in_calls_that_fit() -> None:
    (found,) = findings(CHECKS["SYN118"], headed())
    assert "rank 0 gives 0.bias where rank 1 gives 1.bias" in found.message and found.where is not None and found.where.line == 65
    for healthy in (headed(alike=True), headed(filled=True), headed(apart=True), headed(flat=True), headed(trunk=True)):
        assert findings(CHECKS["SYN118"], healthy) == []


def lone_loss(*, graphed: bool = True, every: int = 1, numel: int = 1, ddp: bool = False) -> Run:
    stack = [site(28, func="average"), site(48, func="train_step")]

    def extra(r: int) -> list[Event]:
        told = [event("accumulation", site=site(50, func="train_step"), opt=0)]
        return told + [coll("all_reduce", 28, s=s, numel=numel, **({"graphed": stack if s == 0 else True} if graphed else {})) for s in range(0, 12, every)]

    return two_ranks(ddp=ddp, extra=extra, each=lambda r, s: {"grad": 5 + r, "param": 10 * s + r}, wrong={"grad": (0, 1, 2, 3), "param": (0, 1, 2, 3)})


def test_a_loss_that_is_reduced_in_place_of_the_gradients() -> None:
    (found,) = findings(CHECKS["SYN126"], lone_loss())
    assert "averages no gradient" in found.message and found.where is not None and found.where.line == 48
    for other in (lone_loss(graphed=False), lone_loss(every=6), lone_loss(numel=3)):  # a loss for the log; now and then; not a loss
        (plain,) = findings(CHECKS["SYN126"], other)
        assert "ever synchronised" in plain.message and plain.where is not None and plain.where.line == 22
    assert findings(CHECKS["SYN126"], lone_loss(ddp=True)) == []
