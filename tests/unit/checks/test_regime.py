"""Runs whose ranks are no replicas by design: no check of replicas or of sharding speaks there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from builder import event
from replica_runs import by_rank, setup, two_ranks

from harness.checks import regime
from harness.checks.base import NotApplicable
from harness.checks.syn import replicas
from harness.record import Event, Run

SHAPES = [[4], [4, 4], [4], [4, 4]]


def apart(setup_of: Callable[[int], list[Event]], *, ddp: bool = False) -> Run:
    """Gradients and parameters differ at every step."""
    return two_ranks(ddp=ddp, each=by_rank(grad=(5, 6), param=(7, 8)), setup_of=setup_of)


def averaged(rank: int) -> list[Event]:
    return [*setup(rank, ddp=False), *(event("before", s=s, opt=0, digest=s) for s in (4, 8))]


@pytest.mark.parametrize(
    ("reason", "setup_of"),
    [
        ("sharded", lambda rank: setup(rank, ddp=False, sharded=True)),
        ("local SGD", lambda rank: [*setup(rank), event("comm_hook", name="post_localSGD_hook", module="torch")]),
        ("local SGD", lambda rank: [*setup(rank), event("model_averager", name="PeriodicModelAverager")]),
        ("local SGD", averaged),
        ("different models", lambda rank: setup(rank, ddp=False, shapes=[[4 + rank], *SHAPES[1:]])),
    ],
)
def test_ranks_that_are_no_replicas(reason: str, setup_of: Callable[[int], list[Event]]) -> None:
    with pytest.raises(NotApplicable, match=reason):
        replicas.require(apart(setup_of))


def test_replicas_are_judged() -> None:
    for ddp in (True, False):
        run = apart(lambda rank, ddp=ddp: setup(rank, ddp=ddp, shapes=SHAPES), ddp=ddp)  # type: ignore[misc]
        assert regime.other(run) == "" and replicas.require(run).partings[0].num_param > 0


def test_ranks_that_send_each_other_their_models_are_no_replicas() -> None:
    def gossip(rank: int) -> list[Event]:
        return [*setup(rank, ddp=False, shapes=SHAPES), *(event("coll", op="batch_isend_irecv", s=s, world=True) for s in range(6))]

    with pytest.raises(NotApplicable, match="messages"):
        replicas.require(apart(gossip))


def test_optimizers_that_hold_a_part_each() -> None:
    parts = (["0.bias", "0.weight"], ["1.bias", "1.weight"])
    with pytest.raises(NotApplicable, match="part of the parameters"):
        replicas.require(apart(lambda rank: setup(rank, names=parts[rank]), ddp=True))
