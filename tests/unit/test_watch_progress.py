"""When standing still is a hang, on written status pages and a clock of our own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness import procfs
from harness.model import Plan, Scenario
from harness.probe import protocol
from harness.watch import pages, processes, progress
from harness.watch.pages import Pages
from harness.watch.processes import ProcessInfo
from harness.watch.progress import Watch
from harness.watch.view import describe

PLAN = Plan("x", Scenario("x", "train.py"), (), 2)


class Ranks:
    """Writes the pages of a run and moves its clock; pids are invented, so who lives and who computes is said here."""

    def __init__(self, folder: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now = folder / protocol.REC_DIR, 1000.0
        self.folder.mkdir(exist_ok=True)
        self.dead: set[int] = set()
        self.busy: set[int] = set()
        monkeypatch.setattr(procfs, "lives", lambda pid, ticks: pid not in self.dead)
        monkeypatch.setattr(procfs, "cpu_s", lambda pid: self.now * (pid in self.busy))
        self.starved: set[int] = set()
        self.load = 0.5
        monkeypatch.setattr(procfs, "holds_gpu", lambda pid: False)
        monkeypatch.setattr(procfs, "delayed_s", lambda pid: 0.9 * self.now * (pid in self.starved))
        monkeypatch.setattr(procfs, "load_per_core", lambda: self.load)
        self.watch = Watch(folder, plan, lambda: self.now)
        self.counts: dict[int, int] = {}

    def write(self, rank: int, op: str = "", step: int = 0, phase: str = "train", moves: bool = True, ppid: int = 1, pid: int = 0, fallen: int = 0) -> None:
        pid = pid or 100 + rank
        self.counts[pid] = self.counts.get(pid, 0) + moves
        stem = f"0-{pid}-5"
        head = protocol.STATUS.pack(2, pid, 1, self.counts[pid], step, 1, phase.encode(), op.encode(), fallen)
        (self.folder / f"{stem}.status").write_bytes(head + b"train.py:7:main".ljust(protocol.STATUS_SITE_BYTES, b"\0"))
        (self.folder / f"{stem}.jsonl").write_text(json.dumps({"k": "start", "rank": rank, "ppid": ppid}) + "\n")

    def hung_after(self, most_s: float = 400.0) -> float:
        """Seconds of standing still after which the watch calls it a hang; infinite where it never does."""
        begun = self.now
        self.watch.poll()
        while self.now < begun + most_s:
            self.now += 0.5
            if self.watch.poll().hung:
                return self.now - begun
        return float("inf")


Make = Callable[..., Ranks]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    return lambda **changes: Ranks(tmp_path, replace(PLAN, **changes), monkeypatch)


@pytest.mark.parametrize(
    ("ops", "step", "limit_s"),
    [
        (("init", "init"), 0, 20.0),
        (("all_reduce", "barrier"), 0, 20.0),
        (("all_reduce", "backward"), 9, 10.0),
        (("all_reduce", ""), 9, 30.0),  # the other one computes: slow before it is a hang
        (("all_reduce", "data"), 9, 30.0),
        (("data", "data"), 9, 30.0),  # a loader worker may be stuck
        (("", ""), 9, float("inf")),  # nobody waits
        (("", ""), 0, float("inf")),
    ],
)
def test_the_limit_follows_who_waits(make: Make, ops: tuple[str, str], step: int, limit_s: float) -> None:
    ranks = make()
    for rank, op in enumerate(ops):
        ranks.write(rank, op, step)
    assert ranks.hung_after() == limit_s


@pytest.mark.parametrize(("busy", "below_s", "limit_s"), [((), 0.0, 30.0), ((101,), 0.0, float("inf")), ((), 0.2, float("inf"))])
def test_a_thread_that_fell_is_waited_for_where_nothing_works(
    make: Make, monkeypatch: pytest.MonkeyPatch, busy: tuple[int, ...], below_s: float, limit_s: float
) -> None:
    """A program that a rank has started may be what it waits for."""
    ranks = make()
    ranks.busy.update(busy)
    monkeypatch.setattr(pages.ThisHost, "below_cpu_s", lambda host, stem: below_s)
    ranks.write(0, "", 9, fallen=1)
    ranks.write(1, "", 9)
    assert ranks.hung_after() == limit_s


def test_a_rank_that_uses_the_cpu_gets_nine_times_the_limit(make: Make) -> None:
    ranks = make()
    ranks.busy.add(101)
    ranks.write(0, "all_reduce", 9)
    ranks.write(1, "", 9)
    assert ranks.hung_after() == 90.0


@pytest.mark.parametrize(("op", "limit_s"), [("ddp_init", 180.0), ("init", 180.0), ("backward", 180.0), ("barrier", 20.0), ("destroy", 20.0)])
def test_a_call_that_also_computes_may_be_busy_and_one_that_only_waits_may_not(make: Make, op: str, limit_s: float) -> None:
    """The constructor of DDP imports torch._dynamo: seconds of CPU, and all ranks are in it."""
    ranks = make()
    ranks.busy.update((100, 101))
    ranks.write(0, op, 0)
    ranks.write(1, op, 0)
    assert ranks.hung_after() == limit_s


@pytest.mark.parametrize(("load", "limit_s"), [(0.5, 20.0), (2.0, 40.0), (9.0, 60.0)])
def test_a_crowded_host_stretches_the_limit(make: Make, load: float, limit_s: float) -> None:
    ranks = make()
    ranks.load = load
    ranks.write(0, "ddp_init")
    ranks.write(1, "ddp_init")
    assert ranks.hung_after() == limit_s


def test_a_process_that_waits_for_a_core_is_at_work(make: Make) -> None:
    """Eight others share two cores: it gets under a tenth of one."""
    ranks = make()
    ranks.starved.add(101)
    ranks.write(0, "all_reduce", 9)
    ranks.write(1, "", 9)
    assert ranks.hung_after() == 90.0


def test_a_process_alone_waits_for_nobody_in_its_backward(make: Make) -> None:
    ranks = make(nproc=1)
    ranks.write(0, "backward", 9)
    assert ranks.hung_after() == float("inf")


def test_at_the_wall_limit_a_slow_run_is_not_one_that_stands_still(make: Make) -> None:
    slow = make()
    for step in range(1, 12):
        slow.write(0, "backward", step)
        slow.write(1, "backward", step)
        slow.watch.poll()
        slow.now += 4.0
    assert not slow.watch.poll().stalled
    slow.now += 9.0
    assert slow.watch.poll().stalled and not slow.watch.poll().hung
    slow.busy.add(100)
    assert not slow.watch.poll().stalled


def test_waiting_for_a_gpu_is_not_work(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = make()
    ranks.busy.update((100, 101))
    monkeypatch.setattr(procfs, "holds_gpu", lambda pid: True)
    ranks.write(0, "all_reduce", 9)
    ranks.write(1, "all_reduce", 9)
    assert ranks.hung_after() == 10.0


@pytest.mark.parametrize(("busy", "limit_s"), [(False, 4.0), (True, 36.0)])
def test_only_use_of_the_cpu_stretches_the_users_limit(make: Make, busy: bool, limit_s: float) -> None:
    ranks = make(hang_timeout_s=4.0)
    if busy:
        ranks.busy.add(101)
    ranks.write(0, "all_reduce", 9)
    ranks.write(1, "", 9)
    assert ranks.hung_after() == limit_s


@pytest.mark.parametrize(("busy", "limit_s"), [(False, 20.0), (True, 180.0)])
def test_a_parent_works_through_the_children_that_it_joins(make: Make, monkeypatch: pytest.MonkeyPatch, busy: bool, limit_s: float) -> None:
    """Spawned workers that import torch have no page of their own yet."""
    monkeypatch.setattr(processes, "tree", lambda root: (ProcessInfo(500, root, "python", "R", 0, ""),))
    ranks = make(nproc=1)
    if busy:
        ranks.busy.add(500)
    ranks.write(0, "join", 0)
    assert ranks.hung_after() == limit_s


def test_slow_steps_stretch_the_limit(make: Make) -> None:
    ranks = make()
    for step in range(1, 12):
        for rank in (0, 1):
            ranks.write(rank, "backward", step)
        ranks.watch.poll()
        ranks.now += 2.0
    ranks.write(0, "backward", 12)
    ranks.write(1, "backward", 12)
    assert ranks.hung_after() == 40.0  # 20 times two seconds


def test_any_movement_starts_the_wait_anew(make: Make) -> None:
    ranks = make()
    ranks.write(0, "all_reduce", 9)
    ranks.write(1, "all_reduce", 9)
    assert ranks.hung_after(9.0) == float("inf")
    ranks.write(1, "all_reduce", 9)
    assert ranks.hung_after() == 10.0


@pytest.mark.parametrize(("op", "limit_s"), [("all_reduce", 3.0), ("backward", 10.0), ("", float("inf"))])
def test_a_dead_peer_shortens_the_wait_in_a_collective(make: Make, op: str, limit_s: float) -> None:
    ranks = make()
    ranks.write(0, op, 9)
    ranks.write(1, "", 9)
    ranks.watch.poll()
    ranks.dead.add(101)
    assert ranks.hung_after() == limit_s


def test_a_loader_worker_that_has_ended_is_no_dead_peer(make: Make) -> None:
    """All ranks may wait for a GPU's queue for longer than three seconds."""
    ranks = make()
    ranks.write(0, "barrier", 9)
    ranks.write(1, "barrier", 9)
    ranks.write(1, "", 0, ppid=101, pid=300)
    ranks.dead.add(300)
    assert ranks.hung_after() == 10.0


def test_a_spawned_rank_that_has_died_is_a_dead_peer(make: Make) -> None:
    ranks = make(nproc=1)
    ranks.write(0, "", 0)
    ranks.write(0, "all_reduce", 9, ppid=100, pid=200)
    ranks.write(0, "", 9, ppid=100, pid=201)
    ranks.dead.add(201)
    assert ranks.hung_after() == 3.0


def test_processes_that_began_behind_a_death_do_not_wait_for_it(make: Make) -> None:
    """torchrun's next attempt, or the next mp.spawn: rank 1 takes its time to the rendezvous."""
    ranks = make(nproc=1)
    ranks.write(0, "", 9, ppid=90, pid=200)
    ranks.write(1, "", 9, ppid=90, pid=201)
    ranks.watch.poll()
    ranks.dead |= {200, 201}
    ranks.watch.poll()
    ranks.now += 1
    for rank in (0, 1):
        ranks.write(rank, "init", 0, ppid=90, pid=202 + rank)
    assert ranks.hung_after() == 10.0
    ranks.dead.add(203)
    assert ranks.hung_after() == 3.0


def test_a_rank_that_has_not_shown_itself_may_still_read_its_data(make: Make) -> None:
    ranks = make()
    ranks.write(0, "init")
    assert ranks.hung_after() == 60.0


def test_a_process_that_does_not_end_is_a_hang(make: Make) -> None:
    ranks = make(nproc=1)
    ranks.write(0, "", 9, phase="ended")
    assert ranks.hung_after() == 10.0


def test_the_parent_of_spawned_ranks_does_not_count_as_computing(make: Make) -> None:
    ranks = make(nproc=1)
    ranks.write(0, "", 0)
    ranks.write(0, "all_reduce", 9, ppid=100, pid=200)
    ranks.write(0, "all_reduce", 9, ppid=100, pid=201)
    assert ranks.hung_after() == 10.0


def test_a_run_without_pages_never_hangs(make: Make) -> None:
    assert make().hung_after() == float("inf")


def test_torn_missing_and_strange_pages_are_no_trouble(make: Make, tmp_path: Path) -> None:
    ranks = make()
    ranks.write(0, "barrier", 3)
    reader = Pages(tmp_path)
    assert [page.status.op for page in reader.read()] == ["barrier"]
    page = ranks.folder / "0-100-5.status"
    whole = page.read_bytes()
    page.write_bytes(b"\3" + whole[1:])  # an odd count: it is being written
    assert [page.status.op for page in reader.read()] == ["barrier"]
    assert Pages(tmp_path).read() == []
    page.write_bytes(whole[:40])
    assert Pages(tmp_path).read() == []
    (ranks.folder / "x-y.status").write_bytes(whole)
    (ranks.folder / "0-7-7.status").symlink_to(page)
    assert Pages(tmp_path).read() == []
    (ranks.folder / "0-100-5.jsonl").write_text("[]\n")
    page.write_bytes(whole)
    assert [page.rank for page in Pages(tmp_path).read()] == [-1]


def test_the_line_for_the_user(make: Make) -> None:
    ranks = make()
    assert describe(ranks.watch.poll(), PLAN) == "starting 2 processes"
    ranks.write(0, "", 0)
    assert describe(ranks.watch.poll(), PLAN) == "before the first step"
    for step in (1, 2, 3):
        ranks.now += 0.5
        ranks.write(0, "all_reduce", step)
        seen = ranks.watch.poll()
    assert describe(seen, PLAN) == "step 3, 2 steps/s"
    ranks.now += 5.0
    line = describe(ranks.watch.poll(), PLAN)
    assert line.startswith("step 3, 2 steps/s, rank 0 has been in all_reduce for ")


def test_real_processes_are_told_apart_by_start_time() -> None:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    assert procfs.lives(os.getpid(), ticks) and not procfs.lives(os.getpid(), ticks + 1)
    assert procfs.cpu_s(os.getpid()) > 0 and not procfs.holds_gpu(os.getpid())
    assert os.getpid() in {seen.pid for seen in processes.tree(os.getppid())}
    assert (pages.parse_stem("0-12-34"), pages.parse_stem("0-12"), pages.parse_stem("0-a-1")) == ((12, 34), None, None)
    assert {"data"} == progress.OWN_WAITS


def test_a_checkpoint_that_a_slow_file_server_takes_is_no_hang(make: Make) -> None:
    """No CPU is used meanwhile; a save that never ends is one in the end."""
    ranks = make()
    ranks.write(0, phase="save", step=50)
    ranks.write(1, "barrier", step=50)
    assert ranks.hung_after() == pytest.approx(90.0, abs=1.0)
    ranks.write(0, step=50)
    assert ranks.hung_after() == pytest.approx(30.0, abs=1.0)
