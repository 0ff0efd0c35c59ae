"""SYN102 where steps inside no_sync() are rare: among steps with digests, between two of them, in the dark; and what mends them."""

from __future__ import annotations

from typing import Any

from builder import event, findings, recording, row, run, site

from harness.checks.registry import all_checks
from harness.model import Severity
from harness.probe import protocol
from harness.record import Event, Run

CHECKS = {c.code: c for c in all_checks()}
LONE = protocol.FLAG_DDP | protocol.FLAG_NO_SYNC


def trained(
    steps: range, lone: tuple[int, ...], *, healed: bool = False, parts: bool = True, dark: tuple[int, ...] = (), extra: tuple[Event, ...] = ()
) -> Run:
    """Two ranks; from the first step of `lone` or `dark` on their parameters differ, where it `parts` them; for that step alone where they are `healed`."""
    first = min((*lone, *dark))
    told = [event("wrap", line=9, index=0, names=["a"]), event("params", opt=0, names=["a"], ddp=[0], numels=[4]), event("no_sync", line=84, index=0)]
    told += [event("lone_step", s=s, opt=0) for s in dark]

    def at(rank: int, s: int) -> bytes:
        own = rank if parts and (s in lone if healed else s >= first) else 0
        digests: dict[str, Any] = {"grad": 1 + rank * parts * (s in lone), "param": 1 + own, "full": 1 + own} if protocol.witnessed(s) else {"grad": 0, "param": 0, "full": 0}
        return row(s, flags=LONE if s in lone else protocol.FLAG_DDP, num_reduce=int(s not in lone), **digests)

    return run([recording([*told, *extra], [at(r, s) for s in steps if protocol.kept(s)], rank=r) for r in (0, 1)])


def test_one_step_an_epoch() -> None:
    (found,) = findings(CHECKS["SYN102"], trained(range(40), (11, 23, 35)))
    assert "3 of 40 optimizer steps" in found.message and found.where and found.where.line == 84
    assert findings(CHECKS["SYN102"], trained(range(40), (11, 23, 35), parts=False)) == []  # averaged by hand


def test_parameters_that_are_averaged_after_each_such_step() -> None:
    mended = trained(range(40), (11, 23, 35), healed=True)
    assert findings(CHECKS["SYN102"], mended) == [] and findings(CHECKS["SYN127"], mended) == []


def test_between_two_steps_with_digests() -> None:
    (found,) = findings(CHECKS["SYN102"], trained(range(420), (299, 399)))
    assert "step 299 follows" in found.message and "agree after step 288 and differ after step 304" in found.notes[0]
    assert findings(CHECKS["SYN102"], trained(range(420), (299, 399), parts=False)) == []
    by_hand = event("coll", line=80, s=3, op="all_reduce", numel=4, grad=True)
    assert findings(CHECKS["SYN102"], trained(range(420), (299,), extra=(by_hand,))) == []


def test_in_the_dark() -> None:
    (found,) = findings(CHECKS["SYN102"], trained(range(2200), (), dark=(2047,)))
    assert "step 2047 follows" in found.message
    assert findings(CHECKS["SYN102"], trained(range(2200), (), dark=tuple(range(1985, 2048)))) == []  # nearly all: something else counts wrong


def test_gradients_of_fsdp2_that_wait() -> None:
    def severity(none: int) -> Severity:
        told = [event("unsynced_step", line=131, s=s, opt=0, num=28, none=none, names=["tok.weight"]) for s in (6, 13)]
        (found,) = findings(CHECKS["SYN102"], run([recording(told, [row(0)], rank=r) for r in (0, 1)]))
        assert found.where is not None and found.where.line == 131 and "step 6, 13" in found.notes[0]
        return found.severity

    assert severity(28) == Severity.ERROR
    assert severity(3) == Severity.WARNING


def test_the_line_of_the_loop_that_enters_no_sync_through_a_helper() -> None:
    backward = event("accumulation", site=site(96, "loss.backward()", func="train"), opt=0, sites=[], reduces=0)
    for callers, noted in (([site(95, "with quiet(model, i):", func="train")], True), ([site(95, func="other")], False), ([], False)):
        entered = event("no_sync", site=site(84, "return model.no_sync()", func="quiet"), index=0, callers=callers)
        of = trained(range(40), (11, 23), extra=(backward,))
        for one in of.present:
            one.events = [entered if e.kind == "no_sync" else e for e in one.events]
            one.__dict__.pop("_by_kind", None)
        (found,) = findings(CHECKS["SYN102"], of)
        assert ("entered at train.py:95: `with quiet(model, i):`" in found.notes) is noted
        assert found.where is not None and found.where.line == 84
