"""SYN127 and OPT111: weights that a rank writes by itself, inside of a backward or between two steps."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, site
from replica_runs import by_rank, setup, two_ranks

from harness.checks.base import Check
from harness.checks.registry import all_checks
from harness.model import Severity
from harness.probe import protocol
from harness.record import Event, Run

CHECKS: dict[str, type[Check]] = {c.code: c for c in all_checks()}


def written_apart(*told: tuple[int, int, dict[str, Any]]) -> Run:
    """(rank, step, what is told) of copies into weights that differ from step 7 on."""
    def extra(rank: int) -> list[Event]:
        return [event(fields.get("kind", "overwrite"), s=s, **({"callers": []} | fields)) for r, s, fields in told if r == rank]

    return two_ranks(each=lambda r, s: {"param": 100 + s + 7 * r * (s > 6)}, wrong={"param": (0,)}, extra=extra)


def test_weights_that_one_rank_writes_and_leaves() -> None:
    swap = {"site": site(82, func="copy_to"), "callers": [site(82, func="copy_to"), site(137)], "guard": site(137)}
    (found,) = findings(CHECKS["OPT111"], written_apart((0, 7, swap), (0, 3, swap | {"guard": site(120)})))
    assert found.where and found.where.line == 137 and found.ranks == (0,) and "rank 0 writes" in found.message and "train.py:82" in found.notes[1]
    (found,) = findings(CHECKS["OPT111"], written_apart((0, 7, swap | {"guard": None}), (1, 7, swap), (1, 7, swap | {"site": site(89, func="restore")})))
    assert found.ranks == (1,)  # both put other weights in, one puts the trained ones back
    (found,) = findings(CHECKS["OPT111"], written_apart((1, 7, {"kind": "wrap_moved", "data": True, "site": site(64, "p.data = shadow")})))
    assert found.where and found.where.line == 64


@pytest.mark.parametrize("told", [[(0, 7), (1, 7)], [(0, 8)], [(0, 6)], []])
def test_writes_that_explain_no_parting(told: list[tuple[int, int]]) -> None:
    (found,) = findings(CHECKS["OPT111"], written_apart(*((rank, s, {"site": site(82)}) for rank, s in told)))
    assert found.message.startswith("parameters differ from step 7 on")


def updated_in_hooks(*, how: str = "step", parted: bool = True, group_size: int = 2, **fields: Any) -> Run:
    def extra(rank: int) -> list[Event]:
        told: dict[str, Any] = {"index": 3, "name": "0.bias", "how": how, "stepped": site(47, func="update"), "no_sync": False, "collectives": 0}
        told |= {"callers": [site(53, func="install"), site(80)]} | fields
        wrap = event("wrap", line=78, index=3, group_size=group_size)
        return [wrap, event("hook_update", site=site(53, func="install"), **told)]

    return two_ranks(each=by_rank(grad=(5, 55), param=(6, 66)) if parted else lambda r, s: {}, wrong={"grad": (0,), "param": (0,)} if parted else None, extra=extra)


def test_steps_in_hooks_before_the_gradients_are_averaged() -> None:
    (found,) = findings(CHECKS["SYN127"], updated_in_hooks())
    assert found.where and found.where.line == 80 and found.message.startswith("the optimizer steps inside the backward") and "train.py:53" in found.notes[0]
    (found,) = findings(CHECKS["SYN127"], updated_in_hooks(how="hand", stepped=None, callers=[site(53, func="install")]))
    assert found.where and found.where.line == 53 and found.message.startswith("parameters are updated")


@pytest.mark.parametrize("fields", [{"parted": False}, {"group_size": 1}, {"no_sync": True}, {"collectives": 1}])
def test_hooks_that_average_by_themselves(fields: dict[str, Any]) -> None:
    assert all("hooks" not in f.message for f in findings(CHECKS["SYN127"], updated_in_hooks(**fields)))


def test_an_update_by_hand_is_not_said_to_have_equal_gradients() -> None:
    """Its gradients are not read: what was averaged may not be what was used."""
    def begun(rank: int) -> list[Event]:
        return [
            *(e for e in setup(rank, ddp=False, opt=protocol.OPT_BY_HAND, kind="by hand") if e.kind != "initial"),
            event("initial", opt=protocol.OPT_BY_HAND, each=[1, 2, 3, 4]),
        ]

    def summed(rank: int) -> list[Event]:
        return [event("coll", line=41, s=s, op="all_reduce", numel=40, grad=False) for s in range(12)]

    made = two_ranks(
        ddp=False, setup_of=begun, extra=summed, wrong={"param": (0,)},
        each=lambda r, s: {"opt": protocol.OPT_BY_HAND, "grad": 0, "hyper": 0, "num_coll": 1, "param": 100 + s + 7 * r},
    )  # fmt: skip
    for recording in made.present:
        size = protocol.DETAIL.size + 32
        parts = [recording.params[at : at + size] for at in range(0, len(recording.params), size)]
        recording.params = b"".join(protocol.DETAIL.pack(s, protocol.OPT_BY_HAND, 4) + part[protocol.DETAIL.size :] for s, part in enumerate(parts))
    assert findings(CHECKS["OPT111"], made) == []
    (found,) = findings(CHECKS["SYN127"], made)
    assert "gradients that are not read" in found.notes[0]


def averaged_then_changed(numel: int, *, backward: bool, kept: float | None = None, graded: bool = True, written: bool = False) -> Run:
    """A flat gradient of 40 numbers is reduced at each step and differs at all of them; `kept`: the step takes what the backward left, times this.
    `written`: the parameters are others before a step than behind the one before."""
    def extra(rank: int) -> list[Event]:
        own = {"0": [1.0 + rank, 2.0, -1.0], "1": [2.0 + rank, 0.5, 3.0]}
        taken = {"0": [4.0 + rank, 1.0, 2.0], "1": [5.0 + rank, 2.0, 2.0]} if kept is None else {k: [kept * x for x in v] for k, v in own.items()}
        told = {"opt": 0, "names": {}, "local": own if backward else {}, "synced": taken, "at_step": taken}
        calls = [event("coll", line=54, s=s, op="all_reduce", numel=numel, dtype="float32", grad=False, world=True, graded=graded) for s in range(12)]
        calls += [event("before", s=s, opt=0, digest=s + 70 * rank) for s in range(12) if written]
        return [*calls, *(event("gradients", s=s, **told) for s in range(6))]

    return two_ranks(ddp=False, each=by_rank(grad=(5, 55), param=(6, 66), num_backward=(1, 1)), wrong={"grad": (0, 1, 2, 3), "param": (0, 1, 2, 3)}, extra=extra)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("numel", [40, 41, 45])
def test_gradients_that_each_rank_changes_behind_their_average(numel: int, backward: bool) -> None:
    (found,) = findings(CHECKS["SYN130"], averaged_then_changed(numel, backward=backward))
    assert "changes what was averaged by itself" in found.message and found.where is not None and found.where.line == 54
    assert "seeded alike" in found.help


@pytest.mark.parametrize("kept", [1.0, 0.5])
@pytest.mark.parametrize("graded", [True, False])
def test_a_result_that_nobody_writes_back_is_called_that(kept: float, graded: bool) -> None:
    """Divided by the accumulation before the reduction, it is the rank's own all the same."""
    (found,) = findings(CHECKS["SYN130"], averaged_then_changed(41, backward=True, kept=kept, graded=graded))
    assert "not written back" in found.message and "copy_" in found.help and found.severity is Severity.ERROR


def test_parameters_that_are_pulled_to_a_centre_stay_apart() -> None:
    """Elastic averaging: what is reduced behind the step moves a centre of the script's own."""
    (found,) = findings(CHECKS["SYN130"], averaged_then_changed(40, backward=True, kept=1.0, graded=False, written=True))
    assert found.severity is Severity.ADVICE and "elastic averaging" in found.help
    (found,) = findings(CHECKS["SYN130"], averaged_then_changed(40, backward=True, kept=1.0, written=True))
    assert found.severity is Severity.WARNING


@pytest.mark.parametrize("numel", [39, 46])
def test_a_tensor_of_another_size_carries_no_gradients(numel: int) -> None:
    assert findings(CHECKS["SYN130"], averaged_then_changed(numel, backward=False)) == []
