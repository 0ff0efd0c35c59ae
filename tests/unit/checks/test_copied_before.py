"""SYN115 where an average was copied before DDP broadcast the weights, or is put into the wrapped model for an evaluation."""

from __future__ import annotations

import pytest
from builder import event, findings
from replica_runs import setup, two_ranks

from harness.checks.syn.frozen_differs import FrozenModuleDiffers
from harness.record import Event, Run


def averaged(
    *, first: tuple[int, int] = (70, 71), began: tuple[int, int] = (70, 71), measured: tuple[int, ...] = (80, 81), inputs: tuple[int, int] = (1, 2), grad: bool = False,
    holder: str = "Net",
) -> Run:  # fmt: skip
    """A copy beside the wrapped Net, not called before the first evaluation."""

    def told(r: int) -> list[Event]:
        one = {"module": holder, "num": 4, "first": first[r], "digest": first[r] + 5, "called": False, "grad": grad, "names": ["0.bias"], "made": None}
        scores = [event("evaluated", line=90, s=8, module="Net", weights=[["Net", 9], ["Net", w]], wrapped=[9, 0], inputs=inputs[r]) for w in measured[r : r + 1]]
        return [event("others", models=[one]), *scores]

    def started(r: int) -> list[Event]:
        events = setup(r)
        for e in events:
            if e.kind == "wrapping":
                e.data.update({"digest": began[r], "module": "Net"})  # type: ignore[attr-defined]
        return events

    return two_ranks(extra=told, setup_of=started)


def test_a_copy_that_was_made_before_the_wrap() -> None:
    for kind in ({}, {"grad": True}, {"holder": "Average"}):
        (found,) = findings(FrozenModuleDiffers, averaged(**kind))  # type: ignore[arg-type]
        assert found.where is not None and found.where.line == 20
        assert "before DDP wraps the model" in found.message


@pytest.mark.parametrize(
    "healthy",
    [
        averaged(first=(70, 70), measured=(80, 80)),  # made equal before the first step
        averaged(first=(70, 70), began=(70, 70), measured=(80, 80)),  # seeded alike
        averaged(began=(60, 61)),  # models of the ranks' own, not the copies of what was wrapped
        averaged(measured=(80,)),  # rank 0 keeps it for itself
        averaged(measured=(80, 80)),  # sent to all before they measure
        averaged(inputs=(1, 1)),
        averaged(measured=(70, 71)),  # what the training began with, to compare with
    ],
)
def test_copies_that_do_no_harm(healthy: Run) -> None:
    assert findings(FrozenModuleDiffers, healthy) == []


def swapped(
    *, weights: tuple[int, int] = (80, 81), inputs: tuple[int, int] = (1, 2), backwards: int = 0, op: str = "all_reduce", numel: int = 2, steps: tuple[int, int] = (8, 8),
    params: tuple[int, int] = (0, 0),
) -> Run:  # fmt: skip
    """The wrapped model is evaluated with what a dictionary of averages has for it."""

    def told(r: int) -> list[Event]:
        score = event("evaluated", line=90, s=steps[r], module="Net", weights=[["Net", weights[r]]], wrapped=[weights[r], backwards], inputs=inputs[r])
        score.data["first_t"] = score.t_ns  # type: ignore[index]
        return [score, event("coll", line=91, s=steps[r], op=op, numel=numel)]

    return two_ranks(extra=told, each=lambda r, s: {"param": 50 + s + params[r]})


def test_weights_that_are_put_in_for_an_evaluation() -> None:
    (found,) = findings(FrozenModuleDiffers, swapped())
    assert found.where is not None and found.where.line == 90 and "put in for the evaluation" in found.message


@pytest.mark.parametrize(
    "healthy",
    [
        swapped(weights=(80, 80)),
        swapped(inputs=(1, 1)),  # each rank tries a candidate of its own on the same samples
        swapped(backwards=3),  # adapted to each rank's task, then measured
        swapped(op="all_gather_object", numel=0),  # told one by one
        swapped(numel=10_000),
        swapped(steps=(8, 9)),
        swapped(params=(0, 7)),  # replicas that parted: another finding's
    ],
)
def test_evaluations_whose_weights_are_right(healthy: Run) -> None:
    assert findings(FrozenModuleDiffers, healthy) == []


@pytest.mark.parametrize(("weights", "began", "found"), [
    (((80, 81),), (70, 71), 1),
    (((80, 81), (82, 83)), (70, 71), 1),  # two averages
    (((80, 81), (9, 9), (80, 81)), (70, 70), 1),  # the trained weights too, and the average on other data
    (((80, 81), (82, 83)), (70, 70), 0),  # draws of noise
    (((80, 81), (82, 83), (84, 85)), (70, 71), 0),
    (((80, 81), (82, 81), (84, 81)), (70, 70), 1),  # one rank's stand still
])  # fmt: skip
@pytest.mark.parametrize("together", [False, True])
def test_draws_of_noise_are_told_from_averages(together: bool, weights: tuple[tuple[int, int], ...], began: tuple[int, int], found: int) -> None:
    def told(r: int) -> list[Event]:
        scores = [
            event("evaluated", line=90, s=8, module="Net", weights=[["Net", w[r]]], wrapped=[w[r], 0], inputs=1 + r, first_t=0) for w in weights
        ]
        if together:  # one loop after the other, and no train() between them
            scores = scores[:1]
            scores[0].data["put_in"] = [[w[r], 3 + r] for w in weights[1:]]  # type: ignore[index]
        return [*scores, event("coll", line=91, s=8, op="all_reduce", numel=2)]

    def started(r: int) -> list[Event]:
        events = setup(r)
        for e in events:
            if e.kind == "wrapping":
                e.data.update({"digest": began[r], "module": "Net"})  # type: ignore[attr-defined]
        return events

    assert len(findings(FrozenModuleDiffers, two_ranks(extra=told, setup_of=started, each=lambda r, s: {"param": 50 + s}))) == found


def test_candidates_put_in_behind_a_shared_evaluation_are_measured_on_the_same_samples() -> None:
    def told(r: int) -> list[Event]:
        score = event("evaluated", line=90, s=8, module="Net", weights=[["Net", 9]], wrapped=[9, 0], inputs=1 + r, first_t=0, put_in=[[80 + r, 3]])
        return [score, event("coll", line=91, s=8, op="all_reduce", numel=2)]

    assert findings(FrozenModuleDiffers, two_ranks(extra=told, each=lambda r, s: {"param": 50 + s})) == []


def test_what_a_torn_recording_says_is_no_finding() -> None:
    def told(r: int) -> list[Event]:
        return [event("evaluated", line=90, s=8, weights=[["Net", 3 + r]], wrapped=odd, inputs=r) for odd in ("x", [1], [None, 0], {})]

    assert findings(FrozenModuleDiffers, two_ranks(extra=told)) == []
