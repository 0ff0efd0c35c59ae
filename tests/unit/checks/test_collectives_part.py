"""Ranks that issue different collectives: gloo aborts one of them, and the finding has to be the call, or the line that decided it."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from harness import frames
from harness.checks.dat import parting
from harness.checks.engine import judge
from harness.checks.hng import waits
from harness.checks.hng.collectives_do_not_match import CollectivesDoNotMatch
from harness.checks.out.under_rank0 import CollectiveUnderRank0
from harness.checks.registry import all_checks
from harness.model import Severity
from harness.probe import protocol
from harness.record import Event, Run
from tests.unit.checks.builder import event, findings, recording, row, run, site

CHECKS = {c.code: c for c in all_checks()}
LATE = 3_000_000_000_000
SAID = "terminate called\n  what():  [enforce fail at pair.cc:464] op.preamble.length <= op.nbytes. 72 vs 24. Received data size doesn't match\n"
LOST = "Connection reset by peer"


def dump(function: str, line: int) -> str:
    """What a rank that gloo aborts leaves in its output."""
    stack = f'  File "/x/site-packages/torch/distributed/c10d.py", line 9 in {function}\n  File "/home/u/train.py", line {line} in main\n'
    return f"{SAID}Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n{stack}"


def coll(line: int, y: int = 0, s: int = 0, **told: Any) -> Event:
    told = {"op": "all_reduce", "numel": 4, "dtype": "float32", "grad": False, "names": [], "world": True} | told
    return event("coll", line=line, y=y, s=s, **told)


def lost(op: str, line: int, **told: Any) -> Event:
    return event("failure", type="RuntimeError", message=LOST, op=op, line=line, **told)


def aborted(*columns: list[Event], log: str, steps: int = 2, first: int = 1) -> Run:
    """Rank `first` died of gloo's abort, the others lost the connection to it."""
    pg = [event("pg", done=True, rank=0, world_size=len(columns), line=3)]
    made = [recording([*pg, *events], [row(s) for s in range(steps)], rank=r) for r, events in enumerate(columns)]
    return run(made, exits=[-6 if r == first else 1 for r in range(len(columns))], logs={first: log})


def test_calls_that_do_not_fit_are_named_where_gloo_aborts() -> None:
    of = aborted([lost("backward", 67)], [coll(30, s=2)], log=dump("all_reduce", 30))
    (found,) = findings(CollectivesDoNotMatch, of)
    assert found.message.endswith("rank 0 waits in backward (gradient all-reduce) (train.py:67); rank 1 waits in all_reduce (train.py:30)")
    assert found.where is not None and found.where.line == 30
    assert [f.code for f in judge(of)[1]] == ["OUT101"]  # one cause, one finding: rank 0 never came to that call


def test_a_collective_inside_of_a_forward_is_named_by_its_trace() -> None:
    trace = '  File "/x/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", line 119, in __call__\n'
    of = aborted([lost("", 54, trace=trace, inner="all_gather_single")], [coll(94, s=2)], log=dump("gather_object", 94))
    (found,) = findings(CollectivesDoNotMatch, of)
    assert "rank 0 waits in a collective of FSDP's own (train.py:54); rank 1 waits in gather_object (train.py:94)" in found.message
    assert found.where is not None and found.where.line == 94
    inner = aborted([lost("", 54, trace="", inner="broadcast")], [coll(94, s=2)], log=dump("gather_object", 94))
    assert ["rank 0 waits in broadcast (train.py:54)" in f.message for f in findings(CollectivesDoNotMatch, inner)] == [True]
    assert findings(CollectivesDoNotMatch, aborted([lost("", 54, trace="", inner="fit")], [coll(94, s=2)], log=dump("gather_object", 94))) == []


def test_a_rank_that_died_of_something_else_is_no_mismatch() -> None:
    log = dump("all_reduce", 30).replace(SAID, "Segmentation fault\n")
    assert findings(CollectivesDoNotMatch, aborted([lost("backward", 67)], [coll(30, s=2)], log=log)) == []
    assert waits.broken(aborted([lost("all_reduce", 30)], [coll(30, s=2)], log=log)) == []


def test_a_loop_with_other_rounds_is_named_by_its_header() -> None:
    told = event("coll_site", line=30, op="all_reduce", ways=[], loop=site(28, "for c in sorted(cells):"))
    of = aborted([told, *[coll(30, s=2)] * 5, lost("backward", 67)], [told, *[coll(30, s=2)] * 6], log=dump("all_reduce", 30))
    (found,) = findings(CollectivesDoNotMatch, of)
    assert found.where is not None and found.where.line == 28 and "rank 0: 5, rank 1: 6" in found.notes[0]
    alike = aborted([told, *[coll(30, s=2)] * 6, lost("backward", 67)], [told, *[coll(30, s=2)] * 6], log=dump("all_reduce", 30))
    assert [f.where.line for f in findings(CollectivesDoNotMatch, alike) if f.where] == [30]


def over_generator(*, gave_up: bool, passes: int = 1, exits: int = 1) -> Run:
    """Rank 1 waits in a generator that rank 0 has left, or has drawn to its end."""
    told = event("coll_site", line=30, op="all_gather", ways=[], loop=site(28, "for x in loader:"))
    consumer = {"loop": site(56, "for x in parts(loader):"), "exits": [site(59 + n, "if full:") for n in range(exits)], "name": "parts"}

    def one_pass(loop: int, ended: bool | None) -> list[Event]:
        opened = event("loader", line=28, s=2, loop=loop, loader=1)
        return [opened] if ended is None else [opened, event("pass", line=28, s=2, loop=loop, loader=1, num_batches=6 if ended else 1, complete=ended)]

    zero = [told, *[coll(30, s=2, op="all_gather")], *[e for n in range(passes) for e in one_pass(n, not gave_up)], lost("backward", 67)]
    one = [told, *[coll(30, s=2, op="all_gather")] * 2, *one_pass(0, None), lost("all_gather", 30, consumer=consumer)]
    return aborted(zero, one, log=dump("all_gather", 30), first=1)


def test_a_generator_that_one_rank_left_is_named_by_the_way_out_of_its_callers_loop() -> None:
    (found,) = findings(CollectivesDoNotMatch, over_generator(gave_up=True))
    assert found.where is not None and found.where.line == 59 and "rank 0 left a generator" in found.message
    assert "left it after 1" in found.notes[1] and "same turn" in found.help
    (found,) = findings(CollectivesDoNotMatch, over_generator(gave_up=True, exits=2))
    assert found.where is not None and found.where.line == 56


@pytest.mark.parametrize("of", [over_generator(gave_up=False), over_generator(gave_up=True, passes=2)])
def test_a_generator_that_nobody_is_known_to_have_left_is_told_beside_its_own_loop(of: Run) -> None:
    (found,) = findings(CollectivesDoNotMatch, of)
    assert found.where is not None and found.where.line == 28 and "left a generator" not in found.message
    assert "the loop at train.py:56" in found.notes[1] and "be left at the same turn" in found.help


def test_behind_an_abort_the_dumped_stack_has_the_loop_over_the_generator() -> None:
    log = dump("all_reduce", 30) + '  File "/home/u/train.py", line 56 in panel\n'
    told = event("coll_site", line=30, op="all_reduce", ways=[], loop=site(28, "for x in loader:"), yields=True)
    passed = [event("loader", line=28, s=2, loop=0, loader=1), event("pass", line=28, s=2, loop=0, loader=1, num_batches=1, complete=False)]
    of = aborted([told, coll(30, s=2), *passed, lost("backward", 67)], [told, *[coll(30, s=2)] * 2, passed[0]], log=log, first=1)
    (found,) = findings(CollectivesDoNotMatch, of)
    assert found.where is not None and found.where.line == 56 and "rank 0 left a generator" in found.message


def test_a_rank_that_was_torn_down_is_where_its_page_says() -> None:
    of = aborted([coll(42, s=2)], [], log=SAID, first=0)
    assert of.ranks[1] is not None
    of.ranks[1].status = protocol.Status(1001, LATE, 9, 2, LATE, "train", "backward", "/home/u/train.py:68:main")
    assert waits.waits(of)[1].sentence == "waits in backward (gradient all-reduce) (train.py:68)"


WAYS = [
    ([{"site": site(34, "if not files:"), "kind": "exit"}], 34),  # the one way past it
    ([{"site": site(34), "kind": "exit"}, {"site": site(70), "kind": "branch"}], 42),  # either may have been it
    ([{"site": site(41, "if rank == 0:"), "kind": "branch"}], 42),
    ([], 42),
]


@pytest.mark.parametrize(("ways", "line"), WAYS)
def test_an_early_return_past_a_collective_is_named(ways: list[dict[str, Any]], line: int) -> None:
    told = event("coll_site", line=42, op="all_reduce", ways=ways, loop=None)
    of = aborted([told, coll(42, s=2), lost("all_reduce", 42)], [told, coll(42, s=2)], [lost("backward", 68)], log=dump("all_reduce", 42))
    (found,) = findings(CollectiveUnderRank0, of)
    assert found.where is not None and found.where.line == line and found.ranks == (0, 1)


AROUND = [
    ([(58, "except FloatingPointError as exc:")], "in an exception handler, ", "a handler runs on the ranks that raised"),
    ([(58, "except (ValueError,"), (40, "if verbose:")], "in an exception handler, ", "a handler runs on the ranks that raised"),
    ([(58, "if loss.item() > 40:"), (70, "except FileNotFoundError:")], "", "reduce the answer over all ranks first"),  # all may train inside of it
    ([(58, "if loss.item() > 40:"), (40, "if lora_rank > 0:")], "", "reduce the answer over all ranks first"),
    ([(58, "if ranking_loss > 4 and rerank:")], "", "reduce the answer over all ranks first"),
    ([(60, "if step % 10 == 0:"), (58, "if args.local_rank == 0:")], "", "move it out of the rank-dependent branch"),
    ([(58, "if is_main_process():")], "", "move it out of the rank-dependent branch"),
    ([(58, "if env.my_rank0:")], "", "move it out of the rank-dependent branch"),
    ([(58, "except ValueError:"), (60, "if rank == 0:")], "", "move it out of the rank-dependent branch"),
    ([(58, "if not dist.get_rank():")], "", "move it out of the rank-dependent branch"),
    ([(58, "if not torch.isfinite(loss):")], "", "reduce the answer over all ranks first"),
    ([], "", "no rank may pass it by"),
]


@pytest.mark.parametrize(("branches", "said", "edit"), AROUND)
def test_the_branch_around_a_lone_collective_says_what_to_do(branches: list[tuple[int, str]], said: str, edit: str) -> None:
    ways = [{"site": site(line, text), "kind": "branch"} for line, text in branches]
    told = event("coll_site", line=42, op="all_reduce", ways=ways, loop=None)
    of = aborted([told, coll(42, s=2), lost("all_reduce", 42)], [told, coll(42, s=2)], [lost("backward", 68)], log=dump("all_reduce", 42))
    (found,) = findings(CollectiveUnderRank0, of)
    assert found.message == f"all_reduce is called {said}on ranks 0-1 only; rank 2 never comes to this statement" and edit in found.help
    assert any(f"({site(58)['file'].rsplit('/', 1)[-1]}:" in note for note in found.notes) is bool(branches)


def test_a_loop_left_by_ones_own_judgement_is_seen_behind_an_abort() -> None:
    loop = {"file": "/home/u/train.py", "func": "main", "first": 54, "last": 56, "level": 0}
    around = {"file": "/home/u/train.py", "func": "main", "first": 50, "last": 90, "level": 1}
    told = event("loop", line=55, of="step", exits=[{"site": site(55, "if done:"), "level": 0, "kind": "break"}], ranges=[loop, around])
    of = aborted([told], [told, lost("backward", 60, frames=[site(60)])], log=dump("backward", 55), first=0)
    found = parting.find(of)
    assert found is not None and found.left == (1,) and [w.line for w in found.exits] == [55]


@pytest.mark.parametrize(("stands", "exits", "told"), [
    (92, [], ["DAT111"]),  # behind all loops: the other rank takes a step more
    (92, [{"site": site(57), "level": 0, "kind": "continue"}], ["HNG103"]),  # its steps may have been passed by: nobody knows why, but the call is no lone one
    (40, [], ["OUT101"]),  # before the loops: the other rank has passed it by
    (70, [{"site": site(57), "level": 0, "kind": "continue"}], ["OUT101"]),  # in the loop around: it may be in a later turn
])  # fmt: skip
def test_a_rank_that_takes_more_steps_has_passed_nothing_by(stands: int, exits: list[Any], told: list[str]) -> None:
    inner, outer = ({"file": "/home/u/train.py", "func": "main", "first": a, "last": b} for a, b in ((54, 58), (50, 90)))
    loop = event("loop", line=55, of="step", exits=exits, ranges=[inner, outer])
    own = [loop, lost("backward", 12, s=2, frames=[site(12, func="learn"), site(55)])]
    of = aborted(own, [loop, coll(stands, s=2)], log=dump("all_reduce", stands))
    found = judge(of)[1]
    assert [f.code for f in found] == told
    if told == ["DAT111"]:
        assert found[0].where is not None and found[0].where.line == 54 and found[0].ranks == (1,)
        assert found[0].notes[:2] == (
            "or it is the loop around it (line 50) that turns more often on some ranks",
            "steps by rank: 2, 2 (of a rank that was still inside: as many as it had completed)",
        )


def test_gradients_of_different_parameters_meet_before_the_step_is_over() -> None:
    def reduced(*sizes: int) -> list[Event]:
        return [coll(24, s=2, numel=n, grad=True) for n in sizes]

    of = aborted([*reduced(80, 4, 16), lost("all_reduce", 24)], reduced(80, 4, 12), log=dump("all_reduce", 24))
    (found,) = findings(CHECKS["SYN118"], of)
    assert "call 3 of step 2 has 16 elements on rank 0 and 12 on rank 1" in found.message
    assert findings(CHECKS["SYN118"], aborted([*reduced(80, 4), lost("all_reduce", 24)], reduced(80, 4), log=dump("all_reduce", 24))) == []


def broadcasts(*roots: int | None, **told: Any) -> Run:
    return run([recording([coll(33, op="broadcast", root=root, **told)], rank=r) for r, root in enumerate(roots)])


def test_a_broadcast_has_one_source() -> None:
    (found,) = findings(CHECKS["SYN139"], broadcasts(0, 1))
    assert found.message == "each rank is the source of its own broadcast: nobody receives anything"
    (other,) = findings(CHECKS["SYN139"], broadcasts(0, 0, 2))
    assert other.message == "the ranks name different sources for one broadcast: rank 0 on rank 0, rank 2 on rank 2"
    assert findings(CHECKS["SYN139"], broadcasts(1, 1)) == []
    assert findings(CHECKS["SYN139"], broadcasts(0, 1, world=False)) == []
    assert findings(CHECKS["SYN139"], broadcasts(None, None)) == []  # an older recording
    owners = [recording([coll(33, op="broadcast", root=n % 2, numel=n + 1) for n in range(4)], rank=r) for r in (0, 1)]
    assert findings(CHECKS["SYN139"], run(owners)) == []  # each parameter from the rank that owns it


def named(order: tuple[int, ...], step: int = 2) -> list[Event]:
    return [coll(40, s=step, numel=16, names=["grad", f"name='layer.{i}'"]) for i in order]


def test_a_permuted_order_needs_no_transposition() -> None:
    def of(*orders: tuple[int, ...]) -> Run:
        return run([recording(named(order), rank=r) for r, order in enumerate(orders)])

    assert len(findings(CHECKS["SYN121"], of((0, 1, 2, 3, 4), (2, 0, 3, 4, 1)))) == 1
    assert findings(CHECKS["SYN121"], of((0, 1, 2, 3), (0, 1, 2, 3))) == []
    drawn = [[e for s, i in enumerate(order) for e in named((i,), s)] for order in ((0, 1, 2, 1), (2, 1, 0, 0))]
    assert findings(CHECKS["SYN121"], run([recording(c, rank=r) for r, c in enumerate(drawn)])) == []  # a task drawn anew at every step


def synced_flag(*, late: bool, flag: bool = True, apart: bool = True) -> Run:
    flags = protocol.FLAG_DDP | (protocol.FLAG_NO_SYNC if flag else 0)
    events = [event("wrap", line=9, index=0, names=["a"]), event("params", opt=0, names=["a"], ddp=[0], numels=[4]), event("sync_flag", line=84, index=0, late=late)]
    return run([recording(events, [row(s, flags=flags, grad=1 + r * apart, param=1 + r * apart) for s in range(4)], rank=r) for r in (0, 1)])


def test_the_flag_is_read_in_the_forward() -> None:
    (found,) = findings(CHECKS["SYN102"], synced_flag(late=True))
    assert found.where is not None and found.where.line == 84 and "between forward and backward" in found.message
    assert "inside no_sync()" in findings(CHECKS["SYN102"], synced_flag(late=False))[0].message
    assert findings(CHECKS["SYN102"], synced_flag(late=True, flag=False)) == []
    assert findings(CHECKS["SYN102"], synced_flag(late=True, apart=False)) == []  # averaged by hand


def test_weights_that_are_tied_after_the_wrap() -> None:
    def of(message: str) -> Run:
        told = [event("wrap", line=9, index=0, names=["a", "b"]), event("params", opt=0, names=["a"], ddp=[0], numels=[4])]
        told += [event("wrap_changed", line=21, index=0, what="tied", names=["b"])]
        failed = [event("failure", type="RuntimeError", message=message, line=66)] if message else []
        return run([recording([*told, *failed], [row(0, param=1, grad=1)], rank=r) for r in (0, 1)], exits=(1, 1) if message else (0, 0))

    (found,) = findings(CHECKS["SYN106"], of("Expected to have finished reduction in the prior iteration"))
    assert found.where is not None and found.where.line == 21 and "parameters of other layers" in found.message
    assert findings(CHECKS["SYN106"], of("")) == []  # find_unused_parameters: it does no harm


def split(*, local: bool, starts: tuple[int, int] = (1, 1), inside: bool = False) -> Run:
    """A normalisation whose gradients agree, and a layer whose gradients differ; local: the first ones differ before somebody reduces them."""
    made = []
    for r in (0, 1):
        names = ["norm.weight", "up.bias", "up.weight"]
        told = [event("params", opt=0, names=names, ddp=[-1] * 3, numels=[4, 8, 32]), event("initial", opt=0, each=[7, 7, starts[r]])]
        told += [
            event("gradients", s=s, opt=0, names={"0": "norm.weight"}, local={"0": [1.0 + r * local]}, at_step={"0": [1.5 if local else 1.0]}) for s in (0, 1)
        ]
        told += [coll(51, s=s, numel=4, grad=True) for s in range(4)] if local else []
        told += [coll(23, s=s, numel=999, inside=True) for s in range(4)] if inside else []
        one = recording(told, [row(s, grad=9 + s + 100 * r, param=9 + s + 100 * r) for s in range(4)], rank=r, world_size=2)
        one.params = b"".join(
            protocol.DETAIL.pack(s, 0, 3) + struct.pack("<6I", *[10 + s, 20 + s + 50 * r, 30 + s + 50 * r] * 2) for s in range(4)
        )
        made.append(one)
    return run(made)


def test_slices_of_a_split_model_are_no_forgotten_gradients() -> None:
    (found,) = findings(CHECKS["SYN128"], split(local=True))
    assert found.severity is Severity.ERROR and "up.bias, up.weight" in found.message
    assert findings(CHECKS["SYN128"], split(local=False)) == []  # nobody reduces them: all ranks read the same data
    assert findings(CHECKS["SYN128"], split(local=True, starts=(1, 2))) == []  # `up` is each rank's own, its bias too
    (advice,) = findings(CHECKS["SYN128"], split(local=True, inside=True))
    assert advice.severity is Severity.ADVICE and advice.where is not None and advice.where.line == 51


def test_the_whole_stack_of_a_dump_is_there() -> None:
    assert [f.function for f in frames.dumped_whole(dump("all_reduce", 30))] == ["all_reduce", "main"]
    assert [f.function for f in frames.dumped(dump("all_reduce", 30))] == ["main"]
