"""SHM101-SHM113 on small runs: a parent and its workers."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.engine import judge
from harness.checks.shm.blocks_left import BlocksLeft
from harness.checks.shm.copy_never_refreshed import CopyNeverRefreshed
from harness.checks.shm.counter_unlocked import CounterWithoutLock
from harness.checks.shm.exhausted import SharedMemoryExhausted
from harness.checks.shm.fork_after_threads import ForkAfterThreads
from harness.checks.shm.gradients_shared import GradientsShared
from harness.checks.shm.message_changes import MessageChanges
from harness.checks.shm.never_updated import SharedModelNeverUpdated
from harness.checks.shm.not_shared import ShareMemoryForgotten
from harness.checks.shm.one_by_one import WorkersOneByOne
from harness.checks.shm.same_batches import SameBatches
from harness.checks.shm.state_not_shared import OptimizerStateNotShared
from harness.checks.shm.used_early import ModelUsedBeforeJoin
from harness.model import OutcomeKind, Severity
from harness.probe import closures, datasets
from harness.probe.protocol import FLAG_ALL_NONE
from harness.record import Event, Run

SHAPES = [[3], [3, 4]]


def model(shared: int = 2, **fields: Any) -> dict[str, Any]:
    return {
        "module": "Net",
        "id": 9,
        "num": 2,
        "shapes": SHAPES,
        "requires_grad": 2,
        "shared": shared,
        "grads": 0,
        "grads_shared": 0,
    } | fields


def team(
    *,
    shared: int = 2,
    changed: bool = False,
    steps: int = 3,
    use: bool = True,
    later: bool = False,
    after: tuple[Event, ...] = (),
    parent_rows: tuple[bytes, ...] = (),
    num: int = 2,
    shapes: Any = SHAPES,
    exitcode: int | None = 0,
    child: tuple[Event, ...] = (),
    joined: bool = True,
    reason: str = "exited",
    **start: Any,
) -> Run:
    """A parent that starts `num` workers with one model."""
    pids = range(2000, 2000 + num)
    fields = {
        "method": "fork",
        "target": "work",
        "threads": 1,
        "os_threads": 1,
        "shm_total": 1 << 30,
        "shm_free": 1 << 29,
        "models": [model(shared)],
    } | start
    used = [event("model_used", line=64, id=9, how="forward", changed=later, t=10**14)] if use else []
    starts = [event("process_start", line=58, key=pid, child=pid, **fields) for pid in pids]
    joins = [
        event("process_join", line=58, key=pid, child=pid, exitcode=exitcode, models=[{"id": 9, "module": "Net", "changed": changed}])
        for pid in pids
    ]
    parent = recording([*starts, *(joins if joined else ()), *after, *used], parent_rows, pid=1000)
    params = [event("params", opt=0, kind="SGD", names=["a", "b"], shapes=shapes)] if steps else []
    children = [recording([*params, *child], [row(n) for n in range(steps)], rank=0, pid=pid, ppid=1000, role="child") for pid in pids]
    return run([parent, *children], nproc=1, reason=reason)


@pytest.mark.parametrize("reason", ["exited", "hang"])
def test_nothing_crashes_on_torn_and_empty_recordings(reason: str) -> None:
    torn = [event(kind) for kind in ("process_start", "process_join", "child_models", "share_memory", "params")]
    torn += [event("process_start", models=[3, {}], child="x"), event("process_join", models=7, child=2000)]
    for one in (
        run([recording()]),
        run([recording(torn)], reason=reason),
        run([recording(torn), recording(torn, pid=2000, role="child")], nproc=1),
    ):
        outcomes, _ = judge(one, select=("SHM",))
        assert [(o.code, o.reason) for o in outcomes if o.kind is OutcomeKind.CRASHED] == []


def test_not_shared() -> None:
    one = team(shared=0)
    found = findings(ShareMemoryForgotten, one)
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM101", Severity.ERROR, 58)]
    assert findings(SharedModelNeverUpdated, one) == []
    model = next(m["id"] for r in one.processes for e in r.of("process_start") for m in e["models"])
    one = team(shared=0, after=(event("share_memory", t=1, line=48, id=model),))
    (asked,) = findings(ShareMemoryForgotten, one)
    assert asked.where and asked.where.line == 48 and "asked for it" in asked.message


def test_trials_on_copies_are_healthy() -> None:
    assert findings(ShareMemoryForgotten, team(shared=0, use=False)) == []


def test_shared_but_never_updated() -> None:
    one = team(shared=2)
    found = findings(SharedModelNeverUpdated, one)
    assert [(f.code, f.severity) for f in found] == [("SHM105", Severity.ERROR)]
    assert "6 steps" in found[0].message
    assert findings(ShareMemoryForgotten, one) == []
    places = [{"file": "/home/u/train.py", "line": 28, "func": "f", "text": "vector_to_parameters(new, net.parameters())"}]
    (rebound,) = findings(SharedModelNeverUpdated, team(shared=2, child=(event("unshared", num=6, at=places),)))
    assert rebound.where is not None and rebound.where.line == 28 and "`.data` was assigned" in rebound.notes[1]


def test_a_process_object_may_lie_where_an_old_one_lay() -> None:
    one = team(shared=2)
    told = [e for p in one.processes for kind in ("process_start", "process_join") for e in p.of(kind)]
    assert len({e["child"] for e in told}) == len(told) / 2 > 1
    for each in told:
        each.data["key"] = 7
    assert [f.code for f in findings(SharedModelNeverUpdated, one)] == ["SHM105"]


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(
    "healthy",
    [
        {"changed": True},
        {"steps": 0},  # they only evaluate
        {"shapes": [[7, 7]]},  # they train something else
        {"exitcode": 1},
        {"joined": False},
        {"after": (event("load_state", t=10**12),)},  # results came back and were loaded
        {"parent_rows": (row(0, t_ns=10**15),)},  # the parent stepped with what came back
        {"later": True},  # the parent put it in by hand
        {"after": (event("models_left", models=[{"id": 9, "changed": True}]),)},
        {"child": (event("pg", done=True, rank=0, world_size=2),)},
    ],
)
def test_healthy_teams(shared: int, healthy: dict[str, Any]) -> None:
    one = team(shared=shared, **healthy)
    assert findings(ShareMemoryForgotten, one) == []
    assert findings(SharedModelNeverUpdated, one) == []


def test_gradients_shared() -> None:
    told = event("child_models", opt=0, kind="SGD", num=2, shared=2, grads_shared=2, state=0, state_shared=0)
    assert [f.code for f in findings(GradientsShared, team(changed=True, child=(told,)))] == ["SHM103"]
    assert findings(GradientsShared, team(changed=True, child=(told,), num=1)) == []
    private = event("child_models", opt=0, kind="SGD", num=2, shared=2, grads_shared=0, state=0, state_shared=0)
    assert findings(GradientsShared, team(changed=True, child=(private,))) == []


def test_private_state_is_advice() -> None:
    told = event("child_models", opt=0, kind="Adam", num=2, shared=2, grads_shared=0, state=4, state_shared=0)
    own = event("optimizer_made", kind="Adam")
    assert [f.severity for f in findings(OptimizerStateNotShared, team(changed=True, child=(own, told)))] == [Severity.ADVICE]
    assert [f.severity for f in findings(OptimizerStateNotShared, team(changed=True, child=(told,)))] == [Severity.WARNING]  # handed over
    shared = event("child_models", opt=0, kind="Adam", num=2, shared=2, grads_shared=0, state=4, state_shared=4)
    assert findings(OptimizerStateNotShared, team(changed=True, child=(shared,))) == []
    fields = shared.data | {"counters": ["step"], "counted_at": site(19)}
    found = findings(OptimizerStateNotShared, team(changed=True, child=(event("child_models", **fields),)))
    assert [(f.severity, f.where and f.where.line) for f in found] == [(Severity.WARNING, 19)] and "counts its `step` for itself" in found[0].message


def test_fork_after_threads() -> None:
    hung = team(threads=2, os_threads=3, steps=0, joined=False, reason="hang")
    _, found = judge(hung, select=("SHM", "HNG"))
    assert [(f.code, f.severity) for f in found] == [("SHM102", Severity.ERROR)]
    assert [f.severity for f in findings(ForkAfterThreads, team(threads=2, os_threads=3))] == [Severity.ADVICE]
    assert findings(ForkAfterThreads, team(threads=1, os_threads=1)) == []
    assert findings(ForkAfterThreads, team(threads=2, os_threads=3, method="spawn", joined=False, steps=0, reason="hang")) == []


def test_exhausted() -> None:
    said = event("failure", line=5, type="RuntimeError", message="unable to write to file </torch_1_2_3>: No space left on device (28)")
    _, found = judge(run([recording([said])], exits=(1,)), select=("SHM", "LAU101"))
    assert [f.code for f in found] == ["SHM106"]
    full = team(exitcode=-7, shm_free=1 << 20)
    assert [f.code for f in findings(SharedMemoryExhausted, full)] == ["SHM106"]
    assert findings(SharedMemoryExhausted, team(exitcode=-7)) == []  # room was left: another bus error
    assert findings(SharedMemoryExhausted, team()) == []


class Leaf:
    """Stands for a module."""


class Holder:
    def __init__(self, leaf: Leaf) -> None:
        self.parts = {"inner": [leaf]}
        self.back = self

    def work(self) -> Leaf:
        return self.parts["inner"][0]


GLOBAL_LEAF = Leaf()


def uses_a_global() -> Leaf:
    return GLOBAL_LEAF


def test_what_a_function_reaches() -> None:
    leaf = Leaf()

    def closes_over() -> Leaf:
        return leaf

    assert leaf in closures.reach([(1, Holder(leaf))], Leaf)
    assert leaf in closures.reach([closes_over], Leaf)
    assert leaf in closures.reach([functools.partial(print, leaf)], Leaf)
    assert leaf in closures.reach([Holder(leaf).work], Leaf)
    assert GLOBAL_LEAF in closures.reach([uses_a_global], Leaf)
    assert leaf not in closures.reach([uses_a_global], Leaf)
    assert len(list(closures.reach([list(map(str, range(9))), [[i] for i in range(9_000)]], Leaf))) <= closures.MAX_VISITED + 1


def draws(*, content: int = 5, trains: bool = True, indices: int = 8, shared: int = 2, rows: bool = True, block: str = "b") -> Any:
    """What one worker drew in one epoch."""
    kept = datasets.pack(list(range(indices, indices + 8)))
    told = {"num_samples": 8, "num_batches": 4, "order": indices, "content": content, "complete": True, "backwards": 4 * trains}
    return [
        event("params", opt=0, kind="SGD", names=["a", block], shapes=SHAPES, shared=shared),
        event("seed", line=44, what="torch", value=1),
        event("loader", line=50, loop=0, loader=0, sampler="RandomSampler", dataset_len=40),
        event("pass", line=50, loop=0, loader=0, indices=kept, rows=kept if rows else "", **told),
    ]


def hogwild(*workers: list[Event], steps: int = 4, lacking: tuple[int, ...] = ()) -> Run:
    """`lacking`: a digest for each worker of which of its parameters have no gradient."""
    pids = range(2000, 2000 + len(workers))
    parent = recording([event("process_start", line=58, key=p, child=p, models=[model()]) for p in pids], pid=1000)
    children = [
        recording(events, [row(n, none=none) for n in range(steps)], rank=0, pid=pid, ppid=1000, role="child")
        for pid, events, none in zip(pids, workers, lacking or [0] * len(workers), strict=True)
    ]
    return run([parent, *children], nproc=1)


def test_workers_that_draw_the_same_batches() -> None:
    found = findings(SameBatches, hogwild(draws(), draws()))
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM107", Severity.WARNING, 44)]


@pytest.mark.parametrize(
    "healthy",
    [
        (draws(), draws(indices=9, content=6)),  # a seed of its own for each
        (draws(), draws(content=6)),  # equal indices into parts of its own for each
        (draws(shared=0), draws(shared=0)),  # each trains a model of its own
        (draws(), draws(trains=False)),  # one evaluates
        (draws(), draws(block="c")),  # a block of layers each
        ([*draws(), event("worker_aims", digests=datasets.pack([1, 2]))], [*draws(), event("worker_aims", digests=datasets.pack([3, 4]))]),  # a column each
        (draws(),),
        (draws(rows=False), draws(rows=False)),  # what lies behind the indices was not seen
    ],
)
def test_workers_whose_batches_may_be_equal(healthy: Any) -> None:
    assert findings(SameBatches, hogwild(*healthy)) == []


def fed(*columns: list[int], shared: int = 2, loader: bool = False, head: bool = False, lacking: tuple[int, ...] = (), aims: Any = ()) -> Run:
    """Workers without a DataLoader, what each fed its model, what its losses were measured against and whether it took something by its number."""
    own = [
        [
            event("params", opt=0, kind="SGD", names=["a", f"heads.{n}" if head else "b"], shapes=SHAPES, shared=shared),
            *([event("loader", line=50, loop=0)] if loader else []),
            event("worker_fed", digests=datasets.pack(column), seeded=site(31)),
            *(event("worker_aims", digests=datasets.pack(aim), by_number=by_number) for aim, by_number in aims[n : n + 1]),
        ]
        for n, column in enumerate(columns)
    ]
    return hogwild(*own, lacking=lacking)


ALIKE = ([*range(1, 11)], [*range(1, 13)])
AIMED, UNSEEN = [*range(31, 41)], [0] * 8


@pytest.mark.parametrize(
    "faulty",
    [
        fed(*ALIKE),
        fed(*ALIKE, aims=[(AIMED, False), ([*AIMED, 41], False)]),
        fed(*ALIKE, aims=[(AIMED, True), (AIMED, True)]),  # something is taken by the number, but not the targets
        fed(*ALIKE, aims=[(UNSEEN, False), (UNSEEN, False)]),  # a loss of the script's own
        fed(*ALIKE, lacking=(5, 5)),
    ],
)
def test_workers_that_draw_the_same_batches_by_hand(faulty: Run) -> None:
    found = findings(SameBatches, faulty)
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM107", Severity.WARNING, 31)]


@pytest.mark.parametrize(
    "healthy",
    [
        fed([*range(1, 11)], [*range(2, 12)]),
        fed([*range(1, 6)], [*range(1, 6)]),  # too few to tell
        fed([7] * 12, [7] * 12),  # all of the data in one batch
        fed([1, 2] * 6, [1, 2] * 6),
        fed([*range(1, 11)]),
        fed([*range(1, 11)], [*range(1, 11)], shared=0),  # a search over settings: models of their own
        fed([*range(1, 11)], [*range(1, 11)], head=True),  # a head each, on the same inputs
        fed(*ALIKE, lacking=(5, 6)),  # all heads are in the optimizer, another one of them has gradients
        fed(*ALIKE, aims=[(AIMED, False), ([n + 9 for n in AIMED], False)]),  # a task each, or a teacher
        fed(*ALIKE, aims=[(UNSEEN, True), (UNSEEN, True)]),  # and a loss of the script's own
        fed([*range(1, 11)], [*range(1, 11)], loader=True),  # SHM107 has the indices
    ],
)
def test_workers_whose_batches_by_hand_may_be_equal(healthy: Run) -> None:
    assert findings(SameBatches, healthy) == []


# ---- SHM112 ----
def adding(*processes: tuple[str, list[int]]) -> Run:
    """Each: the lock of what it adds to, and when."""
    told = [[event("unlocked_add", line=26, t=t, lock=lock, num=2 << n) for n, t in enumerate(times)] for lock, times in processes]
    return run([recording(), *(recording(own, pid=2000 + n, ppid=1000, role="child") for n, own in enumerate(told))], nproc=1)


def test_a_counter_without_its_lock() -> None:
    found = findings(CounterWithoutLock, adding(("/mp-a", [10, 20, 40]), ("/mp-a", [15, 30]), ("/mp-b", [12, 13])))
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM112", Severity.WARNING, 26)]
    assert "2 processes" in found[0].message


def test_counters_that_nobody_else_writes() -> None:
    assert findings(CounterWithoutLock, adding(("/mp-a", [10, 20]))) == []
    assert findings(CounterWithoutLock, adding(("/mp-a", [10, 20]), ("/mp-b", [11, 21]))) == []  # one for each worker
    assert findings(CounterWithoutLock, adding(("/mp-a", [10, 20]), ("/mp-a", [30, 40]))) == []  # one worker after the other
    assert findings(CounterWithoutLock, adding()) == []


# ---- SHM108 ----
def exchange(put: tuple[int, ...], got: tuple[int, ...], **last: Any) -> Run:
    """A sender that puts messages of these contents, and what the parent took out."""
    sent = [event("message_put", line=29, shape=1, digest=d, num=1, t=10 * n, **last) for n, d in enumerate(put, 1)]
    taken = [event("message_got", line=60, shape=1, digest=d, num=1, last=False, t=10 * n + 5) for n, d in enumerate(got, 1)]
    return run([recording(taken), recording(sent, pid=2000, ppid=1000, role="child")], nproc=1)


def test_messages_change_on_the_way() -> None:
    found = findings(MessageChanges, exchange((1, 2, 3), (9, 3, 3)))
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM108", Severity.ERROR, 29)]
    assert found[0].evidence["changed"] == 2


def test_messages_that_arrive_as_they_were_put() -> None:
    assert findings(MessageChanges, exchange((1, 2, 3), (2, 1, 3))) == []
    assert findings(MessageChanges, exchange((1, 2, 3), (1,))) == []
    assert findings(MessageChanges, exchange((1,), (1, 9))) == []  # some were put where nobody looked
    assert findings(MessageChanges, exchange((1, 2), (1, 9), last=True)) == []  # the sender was not looked at any longer
    assert findings(MessageChanges, exchange((), (1,))) == []


# ---- SHM109, SHM110, a copy given instead of the shared model ----
def in_turn(
    *, overlap: bool = False, serials: tuple[int, ...] = (1, 1, 1), shared: int = 2, loop: str = "for w in range(3):", between: str = "", **more: Any
) -> Run:
    """A parent that starts workers of one statement and waits for each, or for all of them at the end."""
    parent: list[Event] = []
    joins = []
    for n, serial in enumerate(serials):
        parent.append(event("process_start", line=54, t=100 + 20 * n, key=n, child=2000 + n, loop=loop, models=[model(serial=serial)]))
        at = 1000 + n if overlap else 110 + 20 * n
        joins.append(event("process_join", line=54, t=at, key=n, child=2000 + n, exitcode=more.get("exitcode", 0), left=False, models=[], at=where(55)))
        if between:
            joins.append(event(between, line=58, t=at + 5, id=9, how="forward", changed=False, done=True))
    told = event("params", opt=0, kind="SGD", names=["a", "b"], shapes=SHAPES, shared=shared)
    children = [
        recording([told], [row(s) for s in range(3)], rank=0, pid=2000 + n, ppid=1000, role="child") for n in range(len(serials))
    ]
    return run([recording([*parent, *joins], pid=1000), *children], nproc=1)


def where(line: int) -> dict[str, Any]:
    return {"file": "/home/u/train.py", "line": line, "func": "main", "text": "p.join()"}


def test_workers_started_and_joined_one_by_one() -> None:
    found = findings(WorkersOneByOne, in_turn())
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM109", Severity.WARNING, 55)]
    assert "3 workers" in found[0].message
    assert [f.severity for f in findings(WorkersOneByOne, in_turn(loop="for epoch in range(9):"))] == [Severity.ADVICE]


@pytest.mark.parametrize(
    "healthy",
    [
        {"overlap": True},
        {"serials": (1, 2, 3)},  # cross-validation: a model of its own each, perhaps at the same address
        {"serials": (1,)},
        {"shared": 0},  # each steps a private copy
        {"between": "model_used"},  # the parent evaluates after each
        {"between": "save"},
        {"exitcode": 1},
    ],
)
def test_processes_that_may_follow_each_other(healthy: dict[str, Any]) -> None:
    assert findings(WorkersOneByOne, in_turn(**healthy)) == []


STEPS_SHARED = event("params", opt=0, kind="SGD", names=["a", "b"], shapes=SHAPES, shared=2)


def watching(*early: Event, use: bool = False, child: tuple[Event, ...] = (STEPS_SHARED,), after: tuple[Event, ...] = (), **more: Any) -> Run:
    return team(changed=True, use=use, child=child, after=(*early, *after), **more)


def early(how: str = "forward", **fields: Any) -> Event:
    return event("model_early", line=68, id=9, how=how, **({"num": 1, "grad": False, "training": True, "since": True} | fields))


def test_model_tested_before_its_workers_have_ended() -> None:
    found = findings(ModelUsedBeforeJoin, watching(early()))
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM110", Severity.ERROR, 68)]
    saved = watching(early("state_dict"))
    saved.ranks[0].events.insert(3, event("save", line=69, t=saved.ranks[0].of("process_start")[0].t_ns + 1, done=True))  # type: ignore[union-attr]
    saved.ranks[0].__dict__.pop("_by_kind", None)
    assert [f.code for f in findings(ModelUsedBeforeJoin, saved)] == ["SHM110"]


@pytest.mark.parametrize(
    "healthy",
    [
        watching(early(), use=True),  # and evaluates again after the last join
        watching(early(num=12)),  # watches the training
        watching(early(since=False)),  # nothing has changed after that
        watching(early("parameters")),  # counts parameters
        watching(early("state_dict")),  # saves nothing
        watching(early(grad=True, training=True)),  # a forward that trains
        watching(early(), after=(event("load_state", t=10**13),)),
        watching(early(), child=(STEPS_SHARED, event("save", line=40, done=True))),  # a worker saves at its end
        watching(early(), child=(STEPS_SHARED, event("evaluated", line=40))),
        watching(early(), exitcode=1),
        watching(early(), joined=False),
        watching(),
    ],
)
def test_uses_before_the_join_that_are_healthy(healthy: Run) -> None:
    assert findings(ModelUsedBeforeJoin, healthy) == []


def test_a_copy_is_given_instead_of_the_shared_model() -> None:
    made = where(43)
    found = findings(SharedModelNeverUpdated, team(models=[model(outside=made)]))
    assert [(f.code, f.where and f.where.line) for f in found] == [("SHM105", 43)]
    between = team(models=[model(outside=made)])
    began = between.ranks[0].of("process_start")[0].t_ns  # type: ignore[union-attr]
    by_state = team(models=[model(outside=made)], after=(event("load_state", t=began),))  # the copy is made by load_state_dict
    assert [f.code for f in findings(SharedModelNeverUpdated, by_state)] == ["SHM105"]
    assert findings(SharedModelNeverUpdated, team(models=[model(outside=made)], use=False)) == []  # trials on copies
    assert findings(SharedModelNeverUpdated, team(models=[model(outside=made)], changed=True)) == []
    assert findings(SharedModelNeverUpdated, team(models=[model(outside=made)], after=(event("load_state", t=10**12),))) == []


# ---- SHM111 ----
def look(s: int, looks: int, reached: int = 0, sizes: tuple[int, ...] = (3, 12), since: int = 0) -> Event:
    params = [{"name": f"fc.{i}", "numel": size, "since": since, "looks": looks, "why": ""} for i, size in enumerate(sizes)]
    return event("unstepped", s=s, opts={"0": reached}, num=len(sizes), numel=sum(sizes), governed=15, made=None, params=params)


def lent(*looks: Event, steps: int = 60, moves: bool = True, **fields: Any) -> Run:
    """One process whose optimizer steps parameters of 3 and 12 elements, with the given looks at what is in no optimizer."""
    made = event("params", opt=0, kind="SGD", names=["fc.0", "fc.1"], numels=[3, 12], shapes=SHAPES)
    filled = event("load_state", line=30, t=1, s=0, error="", matched=2, total=2)
    rows = [row(n, param=n * moves, **fields) for n in range(steps)]
    return run([recording([filled, made, *looks], rows)], nproc=1)


def test_a_copy_that_is_never_refreshed() -> None:
    found = findings(CopyNeverRefreshed, lent(look(1, 1), look(2, 3), look(16, 6)))
    assert [(f.code, f.severity, f.where and f.where.line) for f in found] == [("SHM111", Severity.ERROR, 30)]


@pytest.mark.parametrize(
    "healthy",
    [
        lent(look(1, 1), look(2, 3), event("unstepped", s=9, opts={}, num=0, numel=0, governed=15, made=None, params=[])),  # it moved
        lent(look(1, 1), look(2, 3, reached=2), look(16, 6)),  # gradients of a snapshot beside the model's own
        lent(look(1, 1), look(16, 6), steps=20),  # may be refreshed every 25 steps
        lent(look(1, 1), look(16, 6, sizes=(3, 8))),  # another model
        lent(look(1, 1), look(16, 6, since=40)),  # made anew on the way
        lent(look(1, 1), look(16, 6), moves=False),
        lent(look(1, 1), look(16, 6), flags=FLAG_ALL_NONE),  # a stale optimizer: OPT101
    ],
)
def test_copies_that_are_no_fault(healthy: Run) -> None:
    assert findings(CopyNeverRefreshed, healthy) == []


# ---- SHM113: blocks of shared memory that nobody unlinks ----
def blocks(left: list[int], num: int = 64, first: int = 0, last: int = 60, by: str = "main", exits: tuple[int, ...] = (0,)) -> Run:
    """`num` blocks with inodes 1, 2, ... made by one statement between two steps; `left` have their name at the end."""
    clock = [1_000_000_000 + step * 10_000_000 for step in (first, last)]
    made = event("blocks", line=22, t=clock[1], num=num, first_t=clock[0], inodes=list(range(1, num + 1)))
    rows = [row(s) for s in range(70)]
    ends = [event("blocks_left", inodes=left)] if left else []
    if by == "main":
        return run([recording([made, *ends], rows)], exits=exits)
    return run([recording(ends, rows), recording([made], pid=7, role=by)], exits=exits)


@pytest.mark.parametrize("by", ["main", "child"])
def test_blocks_pile_up(by: str) -> None:
    (found,) = findings(BlocksLeft, blocks(list(range(1, 81)), by=by))
    assert (found.code, found.severity, found.where and found.where.line, found.ranks) == ("SHM113", Severity.WARNING, 22, (0,))
    assert found.message.startswith("64 blocks of shared memory")


def test_a_run_without_blocks_is_not_judged() -> None:
    rows = [row(s) for s in range(70)]
    kinds = [judge(run([recording(told, rows)]), select=("SHM113",))[0] for told in ([], [event("block_made", line=22)])]
    assert [next(o.kind for o in outcomes if o.code == "SHM113") for outcomes in kinds] == [OutcomeKind.NOT_APPLICABLE, OutcomeKind.RAN]


def test_blocks_that_are_meant() -> None:
    everything = list(range(1, 65))
    assert findings(BlocksLeft, blocks([])) == []  # their reader unlinks them, or the script does at its end
    assert findings(BlocksLeft, blocks([61, 62, 63, 64], by="child")) == []  # the last ones are still under way
    assert findings(BlocksLeft, blocks(everything, first=0, last=0)) == []  # a pool, made before the training
    assert findings(BlocksLeft, blocks(everything, first=0, last=5)) == []  # a ring that fills while the first batches come
    assert findings(BlocksLeft, blocks([n + 1000 for n in everything])) == []  # another rank's, which goes on
    assert findings(BlocksLeft, blocks(everything, exits=(1,))) == []  # it died before it could unlink them


@pytest.mark.parametrize(("reader_unlinks", "codes"), [(True, []), (False, ["SHM113"])])
def test_the_rank_that_ends_last_decides(reader_unlinks: bool, codes: list[str]) -> None:
    everything = list(range(1, 65))
    made = event("blocks", line=22, t=1_600_000_000, num=64, first_t=1_000_000_000, inodes=everything)
    left = event("blocks_left", inodes=everything)
    rows = [row(s) for s in range(70)]
    maker = recording([made, left, event("end", t=2_000_000_000, how="exit", steps=70)], rows)
    reader = recording([*([] if reader_unlinks else [left]), event("end", t=3_000_000_000, how="exit", steps=70)], rows, rank=1)
    assert [f.code for f in findings(BlocksLeft, run([maker, reader]))] == codes


def half(*, how: str | None = "forward", trained: bool = True, used: tuple[str, ...] = ("words.weight",), put: bool = True) -> Run:
    parts = [[9, "words.weight"]]
    told = event(
        "half_shared", line=58, root=9, module="Net", asked=site(44), names=["words.weight", "words.bias"], put=[site(35) if put else None, None], num_shared=4
    )  # fmt: skip
    uses = (event("half_used", line=39, parts=[[9, n] for n in used], how=how, t=10**14),) if how else ()
    return team(changed=True, after=(told, *uses), child=(event("half_trained", parts=parts),) if trained else ())


def test_a_part_of_a_shared_model_is_private() -> None:
    (found,) = findings(ShareMemoryForgotten, half())
    assert found.severity is Severity.ERROR and found.where and found.where.line == 35 and "`words.weight` of `Net`" in found.message
    (found,) = findings(ShareMemoryForgotten, half(put=False))
    assert found.where and found.where.line == 44 and "given other data" in found.message
    (found,) = findings(ShareMemoryForgotten, half(how="save"))
    assert found.severity is Severity.ADVICE


def test_parts_that_may_be_private() -> None:
    for healthy in (half(trained=False), half(how=None), half(used=("words.bias",))):
        assert findings(ShareMemoryForgotten, healthy) == []
