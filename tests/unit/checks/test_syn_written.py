"""SYN127 and OPT111: weights that a rank writes by itself, inside of a backward or between two steps."""

from __future__ import annotations

from typing import Any

import pytest
from builder import event, findings, row, site
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


def averaged_then_changed(numel: int, *, backward: bool, kept: float | None = None, graded: int = True, written: bool = False) -> Run:
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


def scaled(of: Run, factors: tuple[float, ...], **site_fields: Any) -> Run:
    """What the steps take is the same on both ranks but for rank 1's factor."""
    taken, own = [0.5, -1.0, 2.0, 3.0, 0.25, -0.75, 1.5, 4.0], [1.0, 2.0, -1.0, 0.5, 3.0, 1.0, 2.0, 0.25]
    for rank, recording in enumerate(of.present):
        told = event("coll_site", line=54, op="all_reduce", ways=[], loop=None, **site_fields)
        recording.events.append(told)
        recording.__dict__.pop("_by_kind", None)
        for e, factor in zip(recording.of("gradients"), factors, strict=False):
            e.data["local"] = {"0": [x + 3 * rank for x in own]}  # type: ignore[index]
            e.data["synced"] = {"0": [x * (factor if rank else 1.0) for x in taken]}  # type: ignore[index]
    return of


@pytest.mark.parametrize("divided", [None, site(57, "flat.div_(ntokens)")])
def test_a_factor_of_each_rank_s_own_is_named_as_one(divided: dict[str, Any] | None) -> None:
    of = averaged_then_changed(41, backward=True)
    (found,) = findings(CHECKS["SYN130"], scaled(of, (2.0, 1.5, 0.5, 2.0, 0.8, 1.25), divided=divided, callers=[]))
    assert "scales the result by a number of its own" in found.message and "a count (of tokens, of samples) that was reduced too" in found.help
    assert found.where is not None and found.where.line == (57 if divided else 54)
    assert "rank 1's gradients are those of rank 0 times 2, 1.5, 0.5, 2, 0.8, 1.25 at the first steps" in found.notes
    (found,) = findings(CHECKS["SYN130"], averaged_then_changed(41, backward=True))
    assert "noise of its own" in found.message  # no number explains it


@pytest.mark.parametrize(("before", "fires"), [(3, True), (4, False)])
def test_a_reduction_before_the_last_backward_is_called_that(before: int, fires: bool) -> None:
    of = averaged_then_changed(40, backward=True, kept=1.0, graded=before)
    for recording in of.present:
        rows = [row(**(recording.row(s)._asdict() | {"num_backward": 4})) for s in range(recording.num_rows)]
        recording.rows = b"".join(rows)
        calls = [site(88, "average(model)", func="train"), site(120, "main()", func="<module>")]
        recording.events.append(event("coll_site", line=54, op="all_reduce", ways=[], loop=None, callers=calls))
        recording.events[:] = [e for e in recording.events if e.kind != "accumulation"]
        recording.events.append(event("accumulation", site=site(90, "loss.backward()", func="train"), opt=0, sites=[], reduces=0))
        recording.__dict__.pop("_by_kind", None)
    (found,) = findings(CHECKS["SYN130"], of)
    assert ("are reduced after 3 of a step's 4 backwards: what the last one adds stays each rank's own" in found.message) is fires
    if fires:
        assert found.where is not None and found.where.line == 88 and "behind the last `backward()`" in found.help
        assert found.notes[:2] == ("all_reduce is at train.py:54", "the backward is at train.py:90")


def test_parameters_that_are_pulled_to_a_centre_stay_apart() -> None:
    """Elastic averaging: what is reduced behind the step moves a centre of the script's own."""
    (found,) = findings(CHECKS["SYN130"], averaged_then_changed(40, backward=True, kept=1.0, graded=False, written=True))
    assert found.severity is Severity.ADVICE and "elastic averaging" in found.help
    (found,) = findings(CHECKS["SYN130"], averaged_then_changed(40, backward=True, kept=1.0, written=True))
    assert found.severity is Severity.WARNING


@pytest.mark.parametrize("numel", [39, 46])
def test_a_tensor_of_another_size_carries_no_gradients(numel: int) -> None:
    assert findings(CHECKS["SYN130"], averaged_then_changed(numel, backward=False)) == []
