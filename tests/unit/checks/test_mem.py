"""Memory checks: series made by hand, with and without growth."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.checks.engine import judge
from harness.checks.mem import series
from harness.checks.mem.eval_keeps_graph import EvalKeepsGraph
from harness.checks.mem.groups_pile_up import GroupsPileUp
from harness.checks.mem.hooks_pile_up import HooksPileUp
from harness.checks.mem.loss_kept_with_graph import LossKeptWithGraph
from harness.checks.mem.memory_grows import MemoryGrows
from harness.checks.mem.memory_imbalance import MemoryImbalance
from harness.checks.mem.over_budget import OverBudget
from harness.checks.mem.threads_pile_up import ThreadsPileUp
from harness.model import Finding, Severity
from harness.probe import keepers, unfilled
from harness.record import Event, Recording, Run
from tests.unit.checks.builder import event, findings, recording, row, run, site

MB = 1_000_000


def graphs(numbers: list[int], events: tuple[Event, ...] = ()) -> Run:
    return run([recording(events, [row(s, num_graphs=n) for s, n in enumerate(numbers)])])


def test_a_graph_a_step_is_kept() -> None:
    kept = event("graphs", s=7, alive=8, mode="train", keeper=site(31, "losses.append(loss)"), line=28)
    (found,) = findings(LossKeptWithGraph, graphs(list(range(1, 41)), (kept,)))
    assert found.severity is Severity.WARNING and found.where and found.where.line == 31
    assert found.message.startswith("40 autograd graphs of earlier steps are alive after step 39")


def test_without_a_keeper_the_backward_is_named() -> None:
    (found,) = findings(LossKeptWithGraph, graphs(list(range(40)), (event("loss", line=9),)))
    assert found.where and found.where.line == 9


def test_graphs_in_a_container_of_the_scripts() -> None:
    held = event("graphs_held", line=45, name="memory.items", num=45, grown=24, steps=24)
    (found,) = findings(LossKeptWithGraph, graphs([1] * 40, (held,)))
    assert "45 tensors stand in `memory.items`" in found.message and found.where is not None and found.where.line == 45
    assert "`memory" not in findings(LossKeptWithGraph, graphs(list(range(1, 41)), (held,)))[0].message  # one cause, one finding
    assert findings(LossKeptWithGraph, graphs([1] * 40, (event("graphs_held", num=None, name=None),))) == []


def test_a_list_that_is_emptied_every_epoch_still_keeps_graphs() -> None:
    assert len(findings(LossKeptWithGraph, graphs([1 + s % 20 for s in range(60)]))) == 1


def test_outputs_that_are_let_go_after_short_epochs_are_seen_while_all_are_counted() -> None:
    kept = event("graphs", s=7, alive=8, mode="train", keeper=site(31, "outputs.append(output)"), line=28)
    short = [1 + s % 8 for s in range(32)]
    sampled = [(1, 5, 5, 9, 9, 9, 1, 1)[s % 8] for s in range(80)]  # behind them one token stands for four
    assert len(findings(LossKeptWithGraph, graphs([*short, *sampled], (kept,)))) == 1
    assert findings(LossKeptWithGraph, graphs([*short, *sampled])) == []
    assert findings(LossKeptWithGraph, graphs([*short, *([1] * 80)], (kept,))) == []  # no more of it


def test_every_tenth_loss_is_seen_over_a_long_run() -> None:
    assert len(findings(LossKeptWithGraph, graphs([1 + s // 10 for s in range(400)]))) == 1


@pytest.mark.parametrize(
    "alive",
    [[2] * 60, [1, 2] * 30, [s % 8 for s in range(80)], [0] * 5, [1 + s // 40 for s in range(120)], [min(s, 20) for s in range(100)]],
)
def test_graphs_that_come_and_go_are_healthy(alive: list[int]) -> None:
    assert findings(LossKeptWithGraph, graphs(alive)) == []


def evaluation(**fields: object) -> Run:
    told = {"forwards": 20, "peak": 20, "used": False, "keeper": None, **fields}
    return run([recording([event("mode", training=False), event("eval_graphs", line=31, **told)], [row(0)])])


def test_an_evaluation_that_keeps_its_graphs() -> None:
    (found,) = findings(EvalKeepsGraph, evaluation(keeper=site(33, "total += loss")))
    assert found.where and found.where.line == 31 and "kept by train.py:33: total += loss" in found.notes


@pytest.mark.parametrize("fields", [{"peak": 2}, {"used": True}, {"peak": 3, "forwards": 3}, {"peak": None}])
def test_evaluations_that_keep_nothing_or_keep_it_on_purpose(fields: dict[str, object]) -> None:
    assert findings(EvalKeepsGraph, evaluation(**fields)) == []


def test_an_evaluation_that_was_cut_off() -> None:
    events = [event("mode", training=False), event("graphs", alive=64, mode="eval", line=12)]
    assert "64 batches" in findings(EvalKeepsGraph, run([recording(events)]))[0].message


def resident(size: Callable[[int], float], steps: int = 120, events: tuple[Event, ...] = (), step_ns: int = 20_000_000) -> Recording:
    return recording(events, [row(s, rss_bytes=int(400 * MB + size(s)), t_ns=10**9 + s * step_ns) for s in range(steps)])


def test_steady_growth() -> None:
    random.seed(1)
    (found,) = findings(MemoryGrows, run([resident(lambda s: 0.6 * MB * s + random.gauss(0, 2 * MB))]))
    assert found.severity is Severity.WARNING and found.message.startswith("memory grows by ")


def test_the_only_statement_that_fills_a_container_is_named() -> None:
    told = event("keepers", s=20, statements=[site(44, "history.append(x)")])
    (found,) = findings(MemoryGrows, run([resident(lambda s: 0.6 * MB * s, events=(told,))]))
    assert found.where and found.where.line == 44


@pytest.mark.parametrize(("held", "severity"), [(0, Severity.WARNING), (4 * MB, Severity.WARNING), (32 * MB, Severity.ADVICE)])
def test_a_replay_buffer_that_is_not_full_yet_is_no_leak(held: int, severity: Severity) -> None:
    told = event("keepers", s=60, statements=[], unfilled_bytes=held)
    (found,) = findings(MemoryGrows, run([resident(lambda s: 0.6 * MB * s, events=(told,))]))
    assert found.severity is severity


@pytest.mark.parametrize(
    ("parts", "severity"),
    [
        ({"grown": 32, "filled": 30, "held": 0, "kept": 0}, Severity.ADVICE),  # an array that is filled for the first time
        ({"grown": 32, "filled": 4, "held": 28, "kept": 0}, Severity.WARNING),
        ({"grown": 32, "filled": 0, "held": 1, "kept": 30}, Severity.ADVICE),  # a heap in holes
        ({"grown": 32, "filled": 0, "held": 14, "kept": 18}, Severity.WARNING),  # holes between what leaks
        ({"grown": 32, "filled": 0, "held": 0, "kept": 0}, Severity.WARNING),  # not malloc's
    ],
)
def test_memory_that_nobody_holds_or_that_was_there_is_no_leak(parts: dict[str, int], severity: Severity) -> None:
    told = event("keepers", s=60, statements=[], unfilled_bytes=0, **{name: value * MB for name, value in parts.items()})
    (found,) = findings(MemoryGrows, run([resident(lambda s: 0.6 * MB * s, events=(told,))]))
    assert found.severity is severity


def test_only_deques_that_have_room_count() -> None:
    def held(maxlen: int | None) -> int:
        kept = deque(((torch.zeros(256), i, {"next": torch.zeros(256)}) for i in range(50)), maxlen=maxlen)
        return unfilled.held_bytes([kept, [torch.zeros(256)] * 50])

    assert [held(1000), held(50), held(None)] == [50 * 2048, 0, 0]


@pytest.mark.parametrize(
    ("shapes", "stored", "graphs", "severity"),
    [
        ([60, 90], 1, 0, Severity.ADVICE),
        ([10, 90], 1, 0, Severity.WARNING),  # the same few lengths
        ([6, 9], 1, 0, Severity.WARNING),  # too few to tell
        ([60, 90], 12, 0, Severity.WARNING),  # kept by the script
        ([60, 90], 1, 9, Severity.WARNING),  # kept by the script, with their graphs
    ],
)
def test_layers_that_see_ever_new_shapes_fill_a_cache_of_torchs(shapes: list[int], stored: int, graphs: int, severity: Severity) -> None:
    parts = {"statements": [site(44, "losses.append(loss)")], "filled": 0, "held": 20 * MB, "kept": 12 * MB}
    looks = [
        event("keepers", s=20, stored=5 * MB, grown=8 * MB, shapes=[0, 0], **parts),
        event("keepers", s=60, stored=(5 + stored) * MB, grown=32 * MB, shapes=shapes, **parts),
    ]
    kept = [event("graphs", line=31, alive=graphs, mode="train", keeper=None)] * (graphs > 0)
    (found,) = findings(MemoryGrows, run([resident(lambda s: 0.6 * MB * s, events=(*looks, *kept))]))
    assert found.severity is severity and ("oneDNN" in "".join(found.notes)) == (severity is Severity.ADVICE)


def test_a_cache_that_is_never_hit_is_named() -> None:
    told = event("keepers", s=20, statements=[site(44, "history.append(x)")], caches=[[site(13, "@lru_cache"), 90], None])
    (found,) = findings(MemoryGrows, run([resident(lambda s: 0.6 * MB * s, events=(told,))]))
    assert found.where and found.where.line == 13 and "keeps 90 results" in found.notes[-1]


@pytest.mark.parametrize(
    "size",
    [
        lambda s: 0.0,
        lambda s: random.gauss(0, 30 * MB),
        lambda s: 100 * MB * (s > 60),  # one jump
        lambda s: 200 * MB * (1 - 0.9**s),  # a warm-up that levels off
        lambda s: 60 * MB * (s % 30) / 30,  # a saw
        lambda s: 0.05 * MB * s,  # too little
    ],
)
def test_memory_that_does_not_grow_steadily(size: Callable[[int], float]) -> None:
    random.seed(2)
    assert findings(MemoryGrows, run([resident(size)])) == []


def test_short_runs_and_first_passes_are_not_judged() -> None:
    assert findings(MemoryGrows, run([resident(lambda s: 2.0 * MB * s, steps=40)])) == []
    assert findings(MemoryGrows, run([resident(lambda s: 2.0 * MB * s, step_ns=1_000_000)])) == []
    cached = resident(lambda s: 0.6 * MB * s, events=(event("loader", loop=0),))
    assert [f.severity for f in findings(MemoryGrows, run([cached]))] == [Severity.ADVICE]


def test_what_each_pass_gives_back_is_no_growth() -> None:
    ends = tuple(event("pass", s=n, complete=True, backwards=True) for n in (40, 80, 120))
    saw = [40.0 * (s - 40) / 40 if s < 80 else 30.0 + 0.8 * (s - 80) for s in range(120)]  # rises in nearly every block, and starts again at 80
    kept = run([resident(lambda s: MB * (saw[s] if s != 81 else 0), events=ends)])
    assert len(findings(MemoryGrows, run([resident(lambda s: MB * saw[s])]))) == 1
    assert findings(MemoryGrows, kept) == []
    (found,) = findings(MemoryGrows, run([resident(lambda s: 0.6 * MB * s, events=ends)]))
    assert found.severity is Severity.WARNING


def test_pages_of_a_mapped_file_do_not_count() -> None:
    samples = [[10**9 + i * 10**8, int(400 * MB + 3 * MB * i), int(3 * MB * i)] for i in range(30)]
    mapped = resident(lambda s: 0.6 * MB * s, events=(event("rss", samples=samples, grown=[]),))
    assert findings(MemoryGrows, run([mapped])) == []


def test_kept_graphs_explain_the_growth() -> None:
    rows = [row(s, num_graphs=s, rss_bytes=int(400 * MB + 0.6 * MB * s), t_ns=10**9 + s * 20_000_000) for s in range(100)]
    _, found = judge(run([recording([], rows)]), select=("MEM",))
    assert [f.code for f in found] == ["MEM101"] and found[0].consequences == ("MEM103",)


def ranks(*sizes: int) -> Run:
    return run([recording([], [row(s, rss_bytes=size * MB) for s in range(3)], rank=r) for r, size in enumerate(sizes)])


@pytest.mark.parametrize(
    ("sizes", "severities"),
    [
        ((800, 400), [Severity.WARNING]),
        ((560, 400), [Severity.ADVICE]),
        ((450, 400), []),
        ((4100, 4000, 4000), []),
        ((400,), []),
    ],
)
def test_imbalance(sizes: tuple[int, ...], severities: list[Severity]) -> None:
    assert [f.severity for f in findings(MemoryImbalance, ranks(*sizes))] == severities


def test_a_rank_that_starts_the_others_has_an_interpreter_of_another_size() -> None:
    of = ranks(400, 800)
    of.present[1].start["role"] = "child"  # type: ignore[index]
    assert findings(MemoryImbalance, of) == []


def test_a_running_average_on_one_rank_is_a_choice() -> None:
    """100 million parameters in float32 are 400 MB: rank 0 holds them once more."""
    def holding(size_mb: int, rank: int) -> Recording:
        params = event("params", opt=0, numels=[100_000_000], dtypes=["torch.float32"])
        return recording([params], [row(s, rss_bytes=size_mb * MB) for s in range(3)], rank=rank)

    def of(first_mb: int) -> Finding:
        (found,) = findings(MemoryImbalance, run([holding(first_mb, 0), holding(600, 1)]))
        return found

    assert of(1050).severity is Severity.ADVICE and "1.1 times the trained parameters" in of(1050).notes[1]
    assert of(1700).severity is Severity.WARNING


def test_budget() -> None:
    of = run([recording([], [row(0, rss_bytes=500 * MB)])], budget_bytes=400 * MB)
    assert findings(OverBudget, of)[0].message == "rank 0 needs 500 MB, the budget is 400 MB"
    assert findings(OverBudget, run([recording([], [row(0, rss_bytes=500 * MB)])], budget_bytes=600 * MB)) == []
    assert findings(OverBudget, run([recording([], [row(0, rss_bytes=500 * MB)])])) == []


def test_a_trend_needs_enough_values() -> None:
    assert series.trend(range(10), range(10)) is None
    found = series.trend(range(80), [3 * v for v in range(80)])
    assert found is not None and found.slope == pytest.approx(3) and found.steady


ALL = (EvalKeepsGraph, LossKeptWithGraph, MemoryGrows, MemoryImbalance, OverBudget)


@pytest.mark.parametrize("check", ALL)
def test_empty_and_torn_recordings_never_crash(check: type) -> None:
    torn = [event(k) for k in ("graphs", "eval_graphs", "mode", "rss", "memory", "keepers", "pass", "loader")]
    torn.append(event("rss", samples=[[1], "x", None], grown=[[None, 3], 4]))
    findings(check, run([], budget_bytes=5))
    findings(check, run([recording(torn, [row(0)[:99]]), recording(torn, [row(0), row(1)], rank=1)], budget_bytes=5))


KEPT = {
    "by a line that is written later": (
        "class Log:\n    def step(self, n, loss):\n        self.lines.append(lambda: f'{n} {float(loss):.3f}')\n"
        "def f():\n    for n, b in data:\n        loss = model(b)\n        loss.backward()\n        log.step(n, loss)\n", 7, 3),
    "by a default of a lambda": (
        "def f():\n    for b in data:\n        loss = model(b)\n        loss.backward()\n        h.append(lambda loss=loss: loss.item())\n", 4, 5),
    "appended": ("def f():\n    h = []\n    for b in data:\n        loss = model(b)\n        loss.backward()\n"
    "        h.append(loss)\n", 5, 6),
    "summed by the caller": (
        "def step(b):\n    loss = model(b)\n    loss.backward()\n    return loss\ndef f():\n    t = 0\n    for b in data:\n"
        "        l = step(b)\n        print(l.item())\n        t = t + l\n",
        3,
        10,
    ),
    "inside the user's own meter": (
        "class M:\n    def update(self, v):\n        self.sum += v\ndef f(m):\n    for b in data:\n        loss = model(b)\n"
        "        loss.backward()\n        m.update(loss)\n",
        7,
        3,
    ),
    "by a forward hook": (
        "def f():\n    a = []\n    net.register_forward_hook(\n        lambda m, i, o: a.append(o))\n    for b in data:\n"
        "        loss = net(b)\n        loss.backward()\n        h.append(loss.detach())\n",
        7,
        4,
    ),
    "on the line itself": ("def f():\n    v = 0\n    for x, y in data:\n        v += mse(model(x), y)\n", 4, 4),
    "nothing is kept": ("def f():\n    h = []\n    for b in data:\n        loss = model(b)\n"
        "        loss.backward()\n        h.append(loss.item())\n", 5, None),
}  # fmt: skip


@pytest.mark.parametrize("case", KEPT)
def test_the_statement_that_keeps_a_graph_is_read_from_the_source(case: str, tmp_path: Path) -> None:
    source, line, expected = KEPT[case]
    file = tmp_path / "train.py"
    file.write_text(source)
    found = keepers.statement((str(file), line, "f"))
    assert (found[1] if found else None) == expected


def test_containers_that_the_loop_fills(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(
        "def f():\n    h, n, by_epoch = [], [], []\n    for e in range(3):\n        own = []\n"
        "        for b in data:\n            loss = model(b)\n"
        "            loss.backward()\n            own.append(b)\n            n.append(loss.item())\n"
        "            h.append((loss.detach(), b))\n"
        "        by_epoch.append(evaluate())\n"
    )
    assert [s[1] for s in keepers.candidates((str(file), 7, "f"))] == [10]


def test_a_source_that_cannot_be_read_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    for file in ("", str(tmp_path / "missing.py"), str(tmp_path / "broken.py")):
        assert keepers.statement((file, 1, "f")) is None and keepers.candidates((file, 1, "f")) == []


def hooked(num: int, steps: int) -> Run:
    return run([recording([event("hooks", line=35, num=num, steps=steps)], [row(s) for s in range(20)])])


def test_hooks_of_one_statement_pile_up() -> None:
    (found,) = findings(HooksPileUp, hooked(8, 8))
    assert found.severity is Severity.WARNING and found.where is not None and found.where.line == 35


def test_hooks_registered_together_are_healthy() -> None:
    assert findings(HooksPileUp, hooked(8, 1)) == [] and findings(HooksPileUp, hooked(0, 0)) == []


# ---- MEM107: process groups made again and again ----
def grouped(*told: Event) -> Run:
    return run([recording([event("pg", done=True, rank=r, world_size=2), *told], [row(0)], rank=r) for r in range(2)])


def test_process_groups_pile_up() -> None:
    (found,) = findings(GroupsPileUp, grouped(event("groups", line=20, num=4, steps=4, size=2), event("groups", line=20, num=8, steps=8, size=2)))
    assert (found.code, found.severity, found.where and found.where.line, found.ranks) == ("MEM107", Severity.WARNING, 20, (0, 1))
    assert found.message.startswith("8 process groups of the same 2 ranks")


def test_process_groups_that_are_meant() -> None:
    assert findings(GroupsPileUp, grouped()) == []  # made at the start, destroyed after their use, or of other ranks each: the sensor is silent
    assert findings(GroupsPileUp, grouped(event("groups", line=20, num=4, steps=1, size=2))) == []  # several at one step
    assert findings(GroupsPileUp, grouped(event("groups", line=20, num=4, steps=2, size=2))) == []


# ---- containers of objects that nothing empties ----
CLASSES = '''import torch
class Clips:
    def __init__(self):
        self.cache = {}
        self.names = []
    def __getitem__(self, i):
        key = (i, draw())
        if key not in self.cache:
            self.cache[key] = self.load(i)
        return self.cache[key]
class Net(torch.nn.Module):
    def __init__(self):
        self.maps = []
    def forward(self, x):
        attention = self.score(x).softmax(1)
        self.maps.append(ATTENTION)
        return attention
def main():
    for x in loader:
        loss = net(x).sum()
        loss.backward()
'''


def in_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    file = tmp_path / "train.py"
    file.write_text(source)
    monkeypatch.setattr(keepers.cuts, "user_files", lambda: [str(file)])
    return str(file)


def test_a_cache_and_a_list_of_objects_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = in_file(tmp_path, monkeypatch, CLASSES.replace("ATTENTION", "attention"))
    assert keepers.candidates((file, 21, "main")) == [(file, 9, "__getitem__"), (file, 16, "forward")]
    assert keepers.statement((file, 21, "main")) == (file, 16, "forward")


@pytest.mark.parametrize(
    "line",
    [
        "self.maps.append(attention.detach())",
        "self.maps.append(attention); self.maps.pop(0)",
        "self.maps = [attention]",
        "self.maps.append(attention) if len(self.maps) < 9 else None",
        "self.maps.append(attention); self.maps.clear()",
    ],
)
def test_a_list_that_is_emptied_or_holds_no_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    file = in_file(tmp_path, monkeypatch, CLASSES.replace("self.maps.append(ATTENTION)", line))
    assert keepers.statement((file, 21, "main")) is None


def test_a_cache_of_bounded_size_is_not_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = CLASSES.replace("ATTENTION", "1").replace("        return self.cache[key]", "        if len(self.cache) > 9: self.cache.popitem()\n        return 1")
    file = in_file(tmp_path, monkeypatch, source)
    assert keepers.candidates((file, 21, "main")) == []


@pytest.mark.parametrize(
    ("kept", "line"), [("ctx.y = y", 5), ("ctx.held = (w, y)", 5), ("ctx.save_for_backward(y)", 0), ("ctx.w = w", 0), ("ctx.n = y.numel()", 0)]
)
def test_an_output_on_the_context(kept: str, line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sine.py"
    file.write_text(
        f"class Sine(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x, w):\n        y = torch.sin(w * x)\n        {kept}\n"
        "        return y\ndef f():\n    for b in data:\n        loss = model(b)\n        loss.backward()\n"
    )
    monkeypatch.setattr("harness.probe.cuts.user_files", lambda: [str(file)])
    found = keepers.statement((str(file), 10, "f"))
    assert (found[1] if found is not None else 0) == line


def test_help_for_an_output_on_the_context() -> None:
    kept = event("graphs", s=7, alive=8, mode="train", keeper=site(18, "ctx.y = y", func="forward"), line=28)
    (found,) = findings(LossKeptWithGraph, graphs(list(range(1, 41)), (kept,)))
    assert "save_for_backward" in found.help and "its own output" in found.message


# ---- MEM108: threads that stay ----
def held(*told: Event) -> Run:
    return run([recording([*told], [row(s) for s in range(100)], rank=r) for r in range(2)])


def waiting(num: int, steps: int, last: int, line: int = 53) -> Event:
    return event("threads_held", line=line, started_at=site(56, "Thread(target=fill).start()"), num=num, steps=steps, first=0, last=last)


def test_threads_pile_up() -> None:
    (found,) = findings(ThreadsPileUp, held(waiting(4, 4, 36), waiting(11, 11, 90)))
    assert (found.code, found.severity, found.where and found.where.line, found.ranks) == ("MEM108", Severity.WARNING, 53, (0, 1))
    assert found.message.startswith("11 threads of one statement wait at this line")
    assert "started at line 56: Thread(target=fill).start()" in found.notes
    assert [f.severity for f in findings(ThreadsPileUp, held(waiting(4, 4, 90)))] == [Severity.ADVICE]
    (found,) = findings(ThreadsPileUp, held(waiting(8, 8, 90), waiting(4, 1, 90, line=70)))  # each place by itself
    assert found.where and found.where.line == 53


def test_threads_that_are_a_fixed_number() -> None:
    assert findings(ThreadsPileUp, held()) == []
    assert findings(ThreadsPileUp, held(waiting(8, 1, 60))) == []  # a pool, made at once
    assert findings(ThreadsPileUp, held(waiting(8, 8, 30))) == []  # a prefetcher for each of eight tasks, made when it was first needed
