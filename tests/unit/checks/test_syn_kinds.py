"""SYN: whole kinds of practice that look alike: communication hooks, gradients that a script takes away, sub-groups, partial sums."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, recording, row, run, site
from replica_runs import by_rank, details, setup, two_ranks

from harness.checks import regime
from harness.checks.base import Check, Inconclusive
from harness.checks.registry import all_checks
from harness.checks.syn import gradients, replicas
from harness.checks.syn.partly import _left_out_by_name
from harness.model import Severity
from harness.record import Event, Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}
MEAN_LOSS = event("loss", line=30, scaled=False, reduction="mean")


def coll(op: str, line: int | None, *, s: int = 1, numel: int = 1, **fields: Any) -> Event:
    told = {"op": op, "numel": numel, "dtype": "float32", "n": 0, "grad": False, "world": True, "names": []}
    return event("coll", line=line, s=s, **(told | fields))


def frequencies(*digests: tuple[int, int], ddp: bool = True, group: int = 2) -> Run:
    """Each rank: the digest of a plain tensor after the wrap and at the third step."""
    def extra(rank: int) -> list[Event]:
        first, now = digests[rank]
        one = {"name": "encode.freqs", "module": "Fourier", "first": first, "now": now, "drawn": site(15)}
        return [event("plain_tensors", index=0, group_size=group, tensors=[one])]

    return two_ranks(extra=extra, ddp=ddp)


def test_a_plain_tensor_that_each_rank_draws_for_itself() -> None:
    (found,) = findings(CHECKS["SYN144"], frequencies((3, 3), (4, 4)))
    assert found.where is not None and found.where.line == 15 and found.severity is Severity.WARNING and "encode.freqs" in found.message


@pytest.mark.parametrize("healthy", [
    frequencies((3, 3), (3, 3)),  # drawn under one seed
    frequencies((3, 5), (4, 6)),  # forward writes it: a cache, a state
    frequencies((3, 3), (4, 4), group=1),  # models of the ranks' own
    frequencies((0, 0), (4, 4)),  # not read
    two_ranks(),
])  # fmt: skip
def test_plain_tensors_that_are_healthy(healthy: Run) -> None:
    assert findings(CHECKS["SYN144"], healthy) == []


def hooked(factor_at: dict[int, float], *, late: float = 1.0) -> Run:
    """Gradients before and after a hook that multiplies the ranks' sum [3, 4] by a factor, a step each."""
    def extra(r: int) -> list[Event]:
        told = [
            event("gradients", s=s, opt=0, own={"0": [1.0 + r, 2.0], "1": [1.0 + r, 2.0]}, local={k: [3.0 * f, 4.0 * f] for k in "01"},
                  at_step={k: [3.0 * f * late, 4.0 * f * late] for k in "01"})
            for s, f in factor_at.items()
        ]  # fmt: skip
        return [event("comm_hook", line=19), MEAN_LOSS, coll("all_reduce", 12, s=36, hook=True), *told]

    return two_ranks(steps=40, extra=extra)


@pytest.mark.parametrize(("factors", "late", "fires"), [
    ({0: 1.0, 1: 1.0, 2: 1.004}, 1.0, True),
    ({0: 0.5, 1: 0.5, 16: 1.0, 32: 1.0}, 1.0, True),  # the branch that compresses forgets to divide
    ({0: 0.5, 1: 0.5, 16: 0.5}, 1.0, False),
    ({0: 1.0, 1: 1.0, 16: 1.0}, 0.5, False),  # divided after the backward
    ({0: 0.5, 1: 0.7, 16: 1.0, 32: 0.6}, 1.0, False),  # low rank: no clear factor
    ({0: 0.5, 16: 1.0}, 1.0, False),  # once is too little
])  # fmt: skip
def test_a_hook_that_sums_is_told_from_one_that_divides(factors: dict[int, float], late: float, fires: bool) -> None:
    found = findings(CHECKS["SYN124"], hooked(factors, late=late))
    assert len(found) == fires
    if fires:
        assert found[0].where is not None and found[0].where.line == 12


@pytest.mark.parametrize("inside", [False, True])
def test_gradients_that_are_reduced_in_hooks_of_the_scripts_own_are_not_compared(inside: bool) -> None:
    """An asynchronous reduction may be under way behind the backward, of gradients that the hook has divided."""
    def extra(r: int) -> list[Event]:
        told = [event("gradients", s=s, opt=0, local={k: [1.0 + r, 2.0] for k in "01"}, at_step={k: [3.0, 4.0] for k in "01"}) for s in range(3)]
        return [MEAN_LOSS, *(coll("all_reduce", 12, s=s, grad=True, inside=inside) for s in range(3)), *told]

    assert bool(findings(CHECKS["SYN124"], two_ranks(ddp=False, extra=extra))) != inside


def test_a_collective_of_a_hook_belongs_to_no_line() -> None:
    callbacks = two_ranks(extra=lambda r: [coll("all_reduce", None if i == r else 35, names=[f"t{i}{r}"]) for i in (0, 1)])
    assert findings(CHECKS["SYN121"], callbacks) == []


def test_gradients_that_the_script_takes_away_on_every_rank_are_no_unused_parameters() -> None:
    def ungraded(taken: list[str]) -> Run:
        return two_ranks(extra=lambda r: [event("no_gradient", opt=0, names=["1.weight"], taken=taken), MEAN_LOSS])

    assert findings(CHECKS["SYN110"], ungraded(["1.weight"])) == []
    assert findings(CHECKS["SYN111"], ungraded(["1.weight"])) == []
    assert len(findings(CHECKS["SYN110"], ungraded([]))) == 1


def test_gradients_taken_away_on_one_rank_are_named() -> None:
    one = two_ranks(extra=lambda r: [MEAN_LOSS] + [event("no_gradient", opt=0, names=["1.weight"], taken=["1.weight"])] * r)
    (found,) = findings(CHECKS["SYN111"], one)
    assert found.ranks == (1,) and "set to None" in found.message


def test_the_line_is_the_gradients_reduce_not_the_losss() -> None:
    faulty = two_ranks(ddp=False, each=by_rank(grad=(5, 55), param=(6, 66)), wrong={"grad": (0,), "param": (0,)}, extra=lambda r: [
        coll("all_reduce", 87, s=1), *[coll("all_reduce", 51, s=s, numel=16, grad=True) for s in range(3)]])  # fmt: skip
    (found,) = findings(CHECKS["SYN128"], faulty)
    assert found.where is not None and found.where.line == 51


@pytest.mark.parametrize("text, severity", [("0.", Severity.ADVICE), ("0", Severity.ADVICE), ("bias", Severity.ERROR), ("head", Severity.ERROR)])
def test_what_the_source_leaves_out_by_its_modules_name_may_be_meant(text: str, severity: Severity) -> None:
    filters = [event("name_filters", excluded=[text])]
    one = two_ranks(ddp=False, each=by_rank(grad=(5, 55), param=(6, 66)), wrong={"grad": (0,), "param": (0,)}, extra=lambda r: filters)
    assert [f.severity for f in findings(CHECKS["SYN128"], one)] == [severity]


def test_a_module_whose_name_merely_holds_the_text_is_not_meant() -> None:
    told = run([recording([event("name_filters", excluded=["head", "bn"])])])
    left = [n for n in ("head.bias", "body.multihead.out.bias", "body.bn1.weight", "body.norm.head.0.bias") if _left_out_by_name(told, n)]
    assert left == ["head.bias", "body.bn1.weight", "body.norm.head.0.bias"]


def four_ranks(grads: tuple[int, ...], **call: Any) -> Run:
    """Four ranks that reduce a flat gradient at every step and part."""
    recordings = []
    for rank in range(4):
        events = [event("pg", done=True, rank=rank, world_size=4), *setup(rank, ddp=False)[1:]]
        events += [coll("all_reduce", 54, s=s, numel=40, **call) for s in range(8)]
        rows = [row(s, grad=100 * s + grads[rank] + 1, param=100 * s + grads[rank] + 1) for s in range(8)]
        recordings.append(recording(events, rows, rank=rank, world_size=4))
    return run(recordings)


def test_a_reduction_over_a_part_of_the_ranks_is_called_that() -> None:
    (found,) = findings(CHECKS["SYN130"], four_ranks((0, 0, 1, 1), world=False, group_size=2))
    assert "sub-groups of 2 of 4 ranks" in found.message and "0 and 1, and among ranks 2 and 3" in found.notes[0]
    (found,) = findings(CHECKS["SYN130"], four_ranks((0, 1, 2, 3)))
    assert "not written back" in found.message


def wrapped_teams(begins: tuple[int, int], grads: tuple[int, ...] = (0, 0, 1, 1)) -> Run:
    """Four ranks, DDP over two groups of two, each group with a start of its own or with the same."""
    made = []
    for rank in range(4):
        team, kept = rank // 2, setup(rank)
        for e in kept:
            if e.kind == "wrap":
                e.data.update(group_ranks=[2 * team, 2 * team + 1], each=[begins[team]] * 4)
        rows = [row(s, grad=100 * s + grads[rank] + 1, param=100 * s + grads[rank] + 1) for s in range(8)]
        made.append(recording([event("pg", done=True, rank=rank, world_size=4), *kept[1:]], rows, rank=rank, world_size=4))
    return run(made)


def test_ddp_over_groups_of_the_ranks_that_start_with_one_model() -> None:
    (found,) = findings(CHECKS["SYN130"], wrapped_teams((7, 7)))
    assert "groups of 2 of 4 ranks: 2 models come of the one" in found.message and found.where is not None


def test_groups_of_ranks_with_a_model_of_their_own_are_no_replicas_of_each_other() -> None:
    assert "an ensemble" in regime.other(wrapped_teams((7, 8))) and regime.other(wrapped_teams((7, 7))) == ""
    for code in ("SYN130", "SYN109", "SYN125", "OPT103"):
        assert findings(CHECKS[code], wrapped_teams((7, 8))) == []


@pytest.mark.parametrize(("seeds", "starts", "loaders", "severity"), [
    ((1, 2), (1, 2), [], Severity.ADVICE),  # an ensemble
    ((1, 2), (1, 2), [event("loader", distributed={"num_replicas": 2, "rank": 0})], Severity.ERROR),
    ((1, 2), (1, 1), [], Severity.ERROR),  # one model, broadcast
    ((1, 1), (1, 2), [], Severity.ERROR),
])  # fmt: skip
def test_members_of_an_ensemble_are_told_from_a_forgotten_wrap(
    seeds: tuple[int, int], starts: tuple[int, int], loaders: list[Event], severity: Severity
) -> None:
    def start(r: int) -> list[Event]:
        events = [e for e in setup(r, ddp=False) if e.kind != "initial"]
        return [*events, *loaders, event("seed", what="torch", value=seeds[r]), event("initial", opt=0, each=[starts[r]] * 4)]

    apart = two_ranks(ddp=False, each=lambda r, s: {"grad": 5 + r, "param": 10 * s + r}, setup_of=start)
    assert [f.severity for f in findings(CHECKS["SYN126"], apart)] == [severity]


def test_an_average_after_the_last_step_of_a_rounds_optimizer_is_no_sync_without_effect() -> None:
    differ = by_rank(grad=(5, 55), param=(6, 66))
    rounds = two_ranks(ddp=False, each=differ, extra=lambda r: [coll("all_reduce", 41, s=12, numel=40, n=i) for i in range(12)])
    assert findings(CHECKS["SYN130"], rounds) == []


def test_a_wrapper_of_a_wrapper_is_named() -> None:
    def wrapped(of_size: int | None) -> Run:
        return two_ranks(extra=lambda r: [event("wrap", line=50, index=1, module="X", of_size=of_size, group_size=2, names=[], each=[])])

    found = findings(CHECKS["SYN131"], wrapped(2))
    assert [(f.where and f.where.line, f.ranks) for f in found] == [(50, (0, 1))]
    assert findings(CHECKS["SYN131"], wrapped(None)) == findings(CHECKS["SYN131"], wrapped(1)) == []


def drifted(apart: float, *, named: bool = True) -> Run:
    """Weights that differ between ranks at every step, gradients that agree; `apart`: by how much a sampled weight of 0.5 differs."""
    def extra(r: int) -> list[Event]:
        return [event("gradients", s=s, opt=0, local={}, at_step={}, weights={"0": [0.5 + r * apart, 0.25]} if named else {}) for s in range(6)]

    return two_ranks(each=lambda r, s: {"param": 100 + s + 7 * r}, wrong={"param": (0,)}, extra=extra)


@pytest.mark.parametrize("code", ["OPT111", "SYN127"])
def test_weights_that_were_moved_and_moved_back_differ_in_their_last_bits_only(code: str) -> None:
    """SAM that subtracts what it added. An edit differs by more, or in elements that nobody sampled."""
    with pytest.raises(Inconclusive, match="last bits"):
        list(CHECKS[code]().end(drifted(3e-8)))
    for edited in (drifted(1e-2), drifted(1e-5), drifted(0.0), drifted(0.0, named=False)):
        assert len(findings(CHECKS[code], edited)) == 1


def test_a_move_between_backward_and_step_is_no_step_by_hand() -> None:
    def extra(names: list[str]) -> list[Event]:
        return [event("params", line=9, opt=65_535, kind="", names=names, numels=[4], ddp=[0], owned=[True], requires_grad=[True])]

    def parted(names: list[str]) -> Run:
        return two_ranks(each=lambda r, s: {"opt": 65_535, "param": 5 + r} if s == 0 else {}, extra=lambda r: extra(names))

    assert 65_535 not in replicas.of(parted(["0.bias"])).partings
    assert 65_535 in replicas.of(parted(["ema.weight"])).partings


@pytest.mark.parametrize(("scale", "backwards", "fires"), [
    (0.0, 1, True),  # a batch drawn without a backward
    (0.0, 2, True),
    (1024.0, 1, True),
    (1024.0, 2, False),  # the scaler skipped the step: both batches had their backward
])  # fmt: skip
def test_a_step_that_a_scaler_skips_is_no_skipped_batch(scale: float, backwards: int, fires: bool) -> None:
    def each(rank: int, step: int) -> dict[str, Any]:
        return {"scale": scale, "num_batches": 2, "num_backward": backwards} if rank == 0 and step == 5 else {"scale": scale, "num_batches": 1}

    assert len(findings(CHECKS["SYN119"], two_ranks(ddp=False, each=each))) == fires
    ahead = two_ranks(ddp=False, each=each, extra=lambda rank: [event("loader", line=20, loop=0, aside=True)])  # drawn by a thread
    assert findings(CHECKS["SYN119"], ahead) == []


def teams_of_experts(starts: tuple[int, ...], grads: tuple[int, ...]) -> Run:
    """Four ranks without DDP: two parameters that all share, and two whose start and gradients are as given."""
    made = []
    for rank in range(4):
        kept = setup(rank, ddp=False)
        for e in kept:
            if e.kind == "initial":
                e.data["each"] = [1, 2, 3 + starts[rank], 4 + starts[rank]]  # type: ignore[index]
        rows = [row(s, grad=100 * s + grads[rank] + 1, param=100 * s + grads[rank] + 1) for s in range(8)]
        told = [event("pg", done=True, rank=rank, world_size=4), *kept[1:], *[coll("all_reduce", 54, s=s, numel=20, grad=True) for s in range(8)]]
        made.append(recording(told, rows, rank=rank, world_size=4))
        made[-1].params = details(8, lambda s, i, rank=rank: 50 + s + i + 1000 * grads[rank] * (i > 1), lambda s, i, rank=rank: 90 + s + i + 1000 * grads[rank] * (i > 1))
    return run(made)


@pytest.mark.parametrize(("starts", "grads", "fires"), [
    ((0, 0, 1, 1), (0, 0, 1, 1), False),  # two experts on two ranks each
    ((0, 0, 0, 0), (0, 1, 2, 3), True),  # left out of the sync
    ((0, 0, 1, 1), (0, 1, 2, 3), True),  # the pairs are not kept equal either
    ((0, 0, 0, 0), (0, 0, 1, 1), True),  # one model for all that is averaged in pairs
])  # fmt: skip
def test_experts_that_are_replicated_in_teams(starts: tuple[int, ...], grads: tuple[int, ...], fires: bool) -> None:
    assert bool(findings(CHECKS["SYN128"], teams_of_experts(starts, grads))) == fires


def coming_apart(start: int) -> Any:
    """DDP's reducer is silent from a step on, and the gradients differ."""
    def each(rank: int, step: int) -> dict[str, Any]:
        return {"num_reduce": 0, "grad": 5 + rank, "param": 100 + 2 * step + rank} if step >= start else {}
    return each


def test_hooks_that_a_replaced_data_drops_are_named() -> None:
    def moved(rank: int) -> list[Event]:
        return [event("wrap_moved", line=46, s=6, index=0, data=True)]

    (found,) = findings(CHECKS["SYN103"], two_ranks(each=coming_apart(6), extra=moved, wrong={"grad": (0,), "param": (0,)}))
    assert found.where and found.where.line == 46 and "from step 6 on" in found.message
    assert findings(CHECKS["SYN103"], two_ranks(extra=moved)) == []  # new data of the same type keeps the hooks
    assert findings(CHECKS["SYN103"], two_ranks(each=coming_apart(3), extra=moved)) == []  # something else came before it
    apart_in_no_sync = two_ranks(each=lambda r, s: {**coming_apart(6)(r, s), "num_forward": 0 if s >= 6 else 1}, extra=moved)
    assert findings(CHECKS["SYN103"], apart_in_no_sync) == []  # the forward goes around DDP


def test_gradients_without_a_backward_are_named_where_they_are_written() -> None:
    def written(rank: int) -> list[Event]:
        return [event("grad_written", line=52, s=0, opt=0, backward=False)]

    def averaged(rank: int) -> list[Event]:
        return [*written(rank), *(coll("all_reduce", 51, s=s, numel=40, n=s) for s in range(12))]

    (found,) = findings(CHECKS["SYN113"], two_ranks(each=coming_apart(0), extra=written))
    assert found.where and found.where.line == 52
    assert findings(CHECKS["SYN113"], two_ranks(each=lambda r, s: {"num_reduce": 0}, extra=written)) == []
    assert findings(CHECKS["SYN113"], two_ranks(each=coming_apart(0), extra=averaged)) == []


def test_a_run_whose_gradients_nobody_averages_is_not_told_to_look_at_one_rank() -> None:
    (late,) = findings(CHECKS["SYN127"], two_ranks(each=coming_apart(4), wrong={"grad": (0,), "param": (0,)}))
    assert "no gradient is averaged from step 4 on" in late.message
    (one,) = findings(CHECKS["SYN127"], two_ranks(each=by_rank(grad=(5, 55), param=(6, 66)), wrong={"grad": (0,), "param": (0,)}))
    assert "one rank only" in str(one.help)  # the reducer did its work


@pytest.mark.parametrize(("local", "told"), [(lambda r: [1.0, 2.0], True), (lambda r: [1.0 + r, 2.0], False)])
def test_gradients_that_part_after_the_backward_are_told_from_those_that_part_in_it(local: Any, told: bool) -> None:
    def extra(r: int) -> list[Event]:
        made = [event("gradients", s=s, opt=0, local={"0": local(r)}, at_step={"0": [v / (2 + 2 * r) for v in local(r)]}) for s in range(6)]
        return [*made, event("grad_written", line=33, opt=0, backward=True)]

    apart = two_ranks(each=by_rank(grad=(5, 55), param=(6, 66)), extra=extra, wrong={"grad": (0,), "param": (0,)})
    (found,) = findings(CHECKS["SYN127"], apart)
    assert ("equal on all ranks after the backward" in found.message) == told
    assert not told or (found.where and found.where.line == 33 and "0.5 on rank 0, 0.25 on rank 1" in found.notes[0])


@pytest.mark.parametrize(("backwards", "steps", "told"), [
    (2, 11, True),  # every rank ran 12 backwards
    (1, 12, False),
    (1, 11, False),  # one batch less
])  # fmt: skip
def test_a_step_left_out_on_one_rank_is_no_skipped_batch(backwards: int, steps: int, told: bool) -> None:
    recordings = [
        recording([*setup(r, ddp=False), event("step_condition", line=40)],
                  [row(s, num_coll=1, num_backward=backwards if r and s == 5 else 1, num_batches=backwards if r and s == 5 else 1) for s in range(n)],
                  rank=r, world_size=2)
        for r, n in ((0, 12), (1, steps))
    ]  # fmt: skip
    found = [f for f in findings(CHECKS["SYN119"], run(recordings, exits=(0, 0))) if "optimizer steps for the same backwards" in f.message]
    assert [(f.where and f.where.line, f.ranks) for f in found] == ([(40, (1,))] if told else [])


@pytest.mark.parametrize(("made", "fires"), [
    (lambda own: min(own, 0.5), True),  # clipped to 0.5, where it was longer
    (lambda own: 1.0, True),  # normalised
    (lambda own: 0.1 * own, False),  # another learning rate
    (lambda own: own, False),
])  # fmt: skip
def test_a_hook_that_clips_sees_the_ranks_own_gradient(made: Any, fires: bool) -> None:
    def extra(r: int) -> list[Event]:
        return [event("leaf_hook", line=35, s=s, key=0, before=0.4 + r + s, after=made(0.4 + r + s), along=True) for s in range(4)]

    found = findings(CHECKS["SYN117"], two_ranks(extra=extra))
    assert [f.where and f.where.line for f in found] == ([35] if fires else [])


@pytest.mark.parametrize("top", [True, False])
def test_modules_that_stayed_in_eval_mode_are_named(top: bool) -> None:
    def extra(r: int) -> list[Event]:
        still = ["drop", "out.0"] if top else ["", "drop", "out.0"]
        return [event("train_flags", s=6, opt=0, num_eval=len(still) * (1 - r), eval=still if r == 0 else [], tops=[top or r == 1])]

    (found,) = findings(CHECKS["SYN120"], two_ranks(each=lambda r, s: {"train": 9 + (s >= 6 and r == 0)}, extra=extra))
    assert "drop, out.0" in found.notes[0] and ("children" in str(found.help)) == top


@pytest.mark.parametrize(("backwards", "unsynced"), [(1, True), (2, False)])
def test_gradients_that_agree_after_the_last_of_several_backwards_may_have_been_reduced_before(backwards: int, unsynced: bool) -> None:
    told = event("gradients", s=2, opt=0, names={"0": "price.weight"}, local={"0": [1.0, 2.0]}, at_step={"0": [1.0, 2.0]})
    made = run([recording([told], [row(s, num_backward=backwards) for s in range(4)], rank=rank) for rank in range(2)])
    assert gradients.equal_unsynced(made, 0, {"price.weight"}) is unsynced

