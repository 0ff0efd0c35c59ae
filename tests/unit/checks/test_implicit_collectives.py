"""Collectives that no call of the script's shows: the forward of DDP, and what Join issues for a rank without batches."""

from __future__ import annotations

from typing import Any

import pytest

from harness.checks.out.under_rank0 import CollectiveUnderRank0
from harness.checks.syn.no_shadow import CollectiveWithoutShadow
from harness.record import Event, Run
from tests.unit.checks.builder import event, findings, recording, row, run, site

LATE = 3_000_000_000_000


def stall(op: str, *stack: dict[str, Any], **told: Any) -> Event:
    return event("stall", t=LATE, s=4, op=op, op_site=f"/home/u/train.py:{stack[0]['line']}:{stack[0]['func']}", stack=list(stack), site=stack[0], **told)


def branch(text: str, kind: str = "branch", line: int = 70) -> dict[str, Any]:
    return {"site": site(line, text), "kind": kind}


INNER, CALL = site(40, "hits += model(x)", func="validate"), site(71, "accuracy = validate(model, val_loader)")
RANK0 = [branch("if rank == 0:")]


def barrier(line: int = 76) -> list[Event]:
    at = site(line, "dist.barrier()")
    return [event("coll", site=at, s=4, op="barrier", numel=-1, dtype="", grad=False, names=[], world=True), stall("barrier", at)]


def validated(first: list[Event], second: list[Event], reason: str = "hang") -> Run:
    told = [event("wrap", line=55, index=0, broadcast_buffers=True, buffers=["norm.running_mean"])]
    made = [recording([event("pg", done=True, rank=r, world_size=2, line=3), *told, *e], [row(s) for s in range(4)], rank=r) for r, e in enumerate((first, second))]
    return run(made, reason=reason, exits=(-15, -15) if reason == "hang" else ())


def forward(ways: list[dict[str, Any]]) -> list[Event]:
    return [stall("ddp_forward", INNER, CALL, ways=ways)]


@pytest.mark.parametrize("text", [
    "if rank == 0:", "if dist.get_rank() == 0:", "if self.rank == 0 and epoch % 2 == 0:", 'if os.environ["RANK"] == "0":', "if not rank:", "if is_main_process():",
    "if accelerator.is_main_process:", "if master_process:", "if rank != 0: return", "elif local_rank == 0:",
])  # fmt: skip
def test_a_forward_under_a_rank_is_at_fault_and_not_the_barrier(text: str) -> None:
    (found,) = findings(CollectiveUnderRank0, validated(forward([branch(text)]), barrier()))
    assert found.where is not None and found.where.line == 71 and found.ranks == (0,)
    assert "on rank 0 only" in found.message and "model.module" in found.help and "broadcasts the model's buffers" in found.message


@pytest.mark.parametrize("text", ["if epoch % 5 == 0:", "if local_rank != -1:", "if rank >= 0:", "if args.domain:", "if ranking.best > 0:", "if remaining:"])
def test_a_condition_that_all_ranks_meet_is_not_blamed(text: str) -> None:
    found = findings(CollectiveUnderRank0, validated(forward([branch(text)]), barrier()))
    assert all(f.where is not None and f.where.line == 76 for f in found)


def test_a_forward_that_the_others_make_too_is_not_lone() -> None:
    both = findings(CollectiveUnderRank0, validated(forward(RANK0), forward(RANK0)))
    been = findings(CollectiveUnderRank0, validated(forward(RANK0), [event("wrap_eval", site=INNER, index=0), *barrier()]))
    computes = findings(CollectiveUnderRank0, validated(forward(RANK0), [stall("", site(90))]))
    assert both == computes == [] and all("forward" not in f.message for f in been)


def test_a_forward_that_ended_well_is_left_alone() -> None:
    assert findings(CollectiveUnderRank0, validated([], [], reason="exited")) == []


def coll(line: int, text: str, numel: int = 1, op: str = "all_reduce", **told: Any) -> Event:
    return event("coll", site=site(line, text), op=op, numel=numel, dtype="float32", grad=False, names=[], world=True, **told)


FORWARD, JOIN, METER = (61, "loss = loss_fn(model(x), y)"), (59, "with Join([model]):"), (35, "dist.all_reduce(both)")
OWN = (12, "Join.notify_join_context(self); dist.all_reduce(t)")


def joined(short: list[Event], long: list[Event], both: bool = True) -> Run:
    told = [event("join", site=site(*JOIN))]
    columns = [[*told, *short], [*(told if both else []), *long]]
    return run([recording([event("pg", done=True, rank=r, world_size=2, line=3), *c], [row(s) for s in range(4)], rank=r) for r, c in enumerate(columns)])


def step(*more: Event) -> list[Event]:
    return [coll(*FORWARD), coll(*FORWARD), *more]


def shadow(num: int) -> list[Event]:
    return [coll(*JOIN) for _ in range(num)]


@pytest.mark.parametrize("meter", [coll(*METER, 2), coll(*METER, 1), coll(35, "dist.barrier()", -1, op="barrier")])
def test_a_collective_that_join_does_not_answer(meter: Event) -> None:
    (found,) = findings(CollectiveWithoutShadow, joined([*step(meter), *shadow(4)], [*step(meter), *step(meter), *step(meter)]))
    assert found.where is not None and found.where.line == 35 and found.ranks == (1, 0) and "run out of batches" in found.message


def test_what_join_answers_is_healthy() -> None:
    meter = coll(*METER, 2)
    for healthy in (
        joined([*step(), *shadow(2)], [*step(), *step()]),  # the model's own
        joined([*step(meter)] * 2, [*step(meter)] * 2),  # as many batches on each rank
        joined([*step(), *shadow(2), *shadow(1), meter], [*step(), *step(), *shadow(1), meter]),  # behind Join
        joined([*step(meter), coll(*FORWARD), coll(*FORWARD), coll(20, "dist.all_reduce(shadow)", 2)], [*step(meter), *step(meter)]),  # a hook of the script's own
        joined([*step(meter), *shadow(3)], [*step(meter), *step(meter)], both=False),
        joined([coll(*OWN), *step(), *shadow(2)], [coll(*OWN), *step(), coll(*OWN), *step()]),  # a Joinable of the script's own
    ):
        assert findings(CollectiveWithoutShadow, healthy) == []
