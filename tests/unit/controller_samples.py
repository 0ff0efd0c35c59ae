"""Small recorded runs and fakes for the controller's tests; no torch, no processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.assembly import assemble
from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.model import Ending, Finding, Header, Outcome, OutcomeKind, Plan, RankExit, Scenario, Severity, Where
from harness.probe import protocol
from harness.record import Recording, Run, parse_events

T0 = 1_700_000_000_000_000_000
GOLDEN = Path(__file__).parents[1] / "golden"


def make_plan(**changes: Any) -> Plan:
    scenario = changes.pop("scenario", Scenario("train", "/home/u/project/train.py"))
    return replace(
        Plan(run_id="0123456789abcdef", scenario=scenario, script_args=("--lr", "0.1"), nproc=2, cwd="/home/u/project", python="python"),
        **changes,
    )


def make_row(step: int, **fields: Any) -> bytes:
    values: dict[str, Any] = dict.fromkeys(protocol.ROW_FIELDS, 0)
    values.update(
        step=step, t_ns=T0 + step * 10_000_000, loss=2.0 - 0.01 * step, grad_norm=float("nan"), lr=0.1, seq=-1,
        wall_s=0.010, data_s=0.001, num_samples=32, num_batches=1, rss_bytes=300 * 2**20,
    )  # fmt: skip
    values.update(fields)
    return protocol.ROW.pack(*(values[name] for name in protocol.ROW_FIELDS))


def make_events(rank: int, world: int = 2, *, more: list[dict[str, Any]] | None = None, end: bool = True, steps: int = 0) -> bytes:
    events: list[dict[str, Any]] = [
        {"k": "start", "t": T0, "pid": 100 + rank, "ppid": 99, "rank": rank, "local_rank": rank, "world_size": world, "role": "main"},
        {"k": "torch", "t": T0, "version": "2.14.1", "cuda": None, "threads": 1},
        {"k": "pg", "t": T0, "rank": rank, "world_size": world, "backend": "gloo", "done": True},
        {"k": "params", "t": T0, "opt": 0, "names": ["w"], "devices": ["cpu"]},
        *(more or []),
    ]
    if end:
        events.append({"k": "end", "t": T0 + 1_000_000_000, "s": steps, "how": "exit", "code": 0, "steps": steps})
    return b"".join(json.dumps({"s": 0, **event}).encode() + b"\n" for event in events)


def make_recording(rank: int, num_steps: int = 40, *, world: int = 2, more: list[dict[str, Any]] | None = None, **fields: Any) -> Recording:
    rows = b"".join(make_row(i, **{k: v(i) if callable(v) else v for k, v in fields.items()}) for i in range(num_steps))
    events = list(parse_events(make_events(rank, world, more=more, steps=num_steps)))
    return Recording(stem=f"0-{100 + rank}-1", events=events, rows=rows)


def exits(*codes: int) -> tuple[RankExit, ...]:
    return tuple(RankExit(rank, 100 + rank, code, T0 + 2_000_000_000 + rank) for rank, code in enumerate(codes))


def make_run(recordings: list[Recording] | None = None, **rest: Any) -> Run:
    plan = rest.pop("plan", None) or make_plan()
    found = [make_recording(0), make_recording(1, loss=lambda i: 2.1 - 0.01 * i)] if recordings is None else recordings
    rest.setdefault("ending", Ending(exits=exits(0, 0), wall_s=3.5))
    return assemble(plan, found, num_cores=2, **rest)


def write_recording(folder: Path, rank: int, num_steps: int = 40, *, end: bool = True, more: list[dict[str, Any]] | None = None) -> None:
    """A recording on disk, as a rank leaves it."""
    rec = folder / protocol.REC_DIR
    rec.mkdir(exist_ok=True)
    stem = f"0-{100 + rank}-1"
    (rec / f"{stem}.jsonl").write_bytes(make_events(rank, end=end, more=more, steps=num_steps))
    (rec / f"{stem}.rows").write_bytes(protocol.ROWS_MAGIC + b"".join(make_row(i) for i in range(num_steps)))


FINDING = Finding(
    "DAT101",
    "sampler-epoch-not-set",
    Severity.ERROR,
    "epochs 0, 1 and 2 drew the same sample order",
    Where("/home/u/project/train.py", 41, "main", "for x, y in loader:"),
    (0, 1),
    ("1024 of 1024 positions identical",),
    "call `sampler.set_epoch(epoch)` before the loop",
)
OUTCOMES = (
    Outcome("LAU101", "rank-failed", OutcomeKind.RAN),
    Outcome("DAT101", "sampler-epoch-not-set", OutcomeKind.RAN, findings=(FINDING,)),
    Outcome("DAT102", "data-not-sharded", OutcomeKind.RAN),
    Outcome("SHM101", "share-memory-forgotten", OutcomeKind.NOT_APPLICABLE, "no process was made by the script"),
    Outcome("SHM102", "fork-after-threads", OutcomeKind.NOT_APPLICABLE, "no process was made by the script"),
    Outcome("MEM103", "memory-grows", OutcomeKind.INCONCLUSIVE, "40 steps; a trend needs 200"),
    Outcome("EVL104", "eval-on-all-ranks", OutcomeKind.DESELECTED),
)
SUBSTANTIAL = frozenset({"DAT101", "DAT102", "MEM103"})


class FakeLaunch(Check):
    """What it does: nothing much."""

    code, name, severity, substantial = "LAU101", "rank-failed", Severity.ERROR, False

    def end(self, run: Run) -> list[Finding]:
        bad = [e.rank for e in run.ending.exits if e.code != 0]
        return [self.finding(f"rank {bad[0]} failed", ranks=bad)] if bad else []


class FakeLoss(Check):
    code, name, severity = "OPT113", "loss-does-not-fall", Severity.ERROR

    def end(self, run: Run) -> list[Finding]:
        if not run.num_steps:
            raise NotApplicable("no step was taken")
        if run.num_steps < 10:
            raise Inconclusive(f"{run.num_steps} steps; a trend needs 10")
        losses = [row.loss for row in run.present[0].all_rows()]
        return (
            []
            if losses[-1] < losses[0]
            else [self.finding("the loss rose", where=Where("/home/u/project/train.py", 7, "main", "loss.backward()"))]
        )


FAKES: list[type[Check]] = [FakeLaunch, FakeLoss]


def fake_judge(run: Run, select: Any, ignore: Any) -> tuple[list[Outcome], list[Finding]]:
    """What harness.checks.engine does, in small."""
    outcomes: list[Outcome] = []
    for kind in FAKES:
        if (select and kind.code not in select) or kind.code in ignore:
            outcomes.append(Outcome(kind.code, kind.name, OutcomeKind.DESELECTED))
            continue
        try:
            found = tuple(kind().end(run))
            outcomes.append(Outcome(kind.code, kind.name, OutcomeKind.RAN, findings=found))
        except NotApplicable as why:
            outcomes.append(Outcome(kind.code, kind.name, OutcomeKind.NOT_APPLICABLE, str(why)))
        except Inconclusive as why:
            outcomes.append(Outcome(kind.code, kind.name, OutcomeKind.INCONCLUSIVE, str(why)))
    return outcomes, [f for o in outcomes for f in o.findings]


class FakeHandle:
    """A run that ends after `polls` looks, or when it is told to stop."""

    def __init__(self, ending: Ending, polls: int, on_poll: Callable[[int], None]) -> None:
        self.ending, self.polls, self.on_poll = ending, polls, on_poll
        self.fallback = ""
        self.pids = {e.rank: e.pid for e in ending.exits}
        self.stopped: str | None = None
        self.count = 0

    def poll(self) -> Ending | None:
        self.count += 1
        self.on_poll(self.count)
        if self.stopped is not None:
            return replace(self.ending, reason=self.stopped, exits=tuple(replace(e, code=-15, by_us=True) for e in self.ending.exits))
        return self.ending if self.count >= self.polls else None

    def stop(self, reason: str) -> None:
        self.stopped = reason


class FakeSupervisor:
    """Writes what ranks would leave behind; `script(plan, folder)` does it."""

    def __init__(
        self, script: Callable[[Plan, Path], None], ending: Ending, polls: int = 2, on_poll: Callable[[int], None] = lambda _: None
    ) -> None:
        self.script, self.ending, self.polls, self.on_poll = script, ending, polls, on_poll
        self.plans: list[Plan] = []
        self.handle: FakeHandle | None = None
        self.closed = False

    def start(self) -> None: ...

    def run(self, plan: Plan, run_dir: Path) -> FakeHandle:
        self.plans.append(plan)
        self.script(plan, run_dir)
        self.handle = FakeHandle(self.ending, self.polls, self.on_poll)
        return self.handle

    def rest(self, seconds: float) -> None: ...

    def close(self) -> None:
        self.closed = True


class FakeWatch:
    """Reports a hang once `silent` says so."""

    silent = 0.0

    def __init__(self, folder: Path, plan: Plan) -> None: ...

    def line(self) -> str:
        return "step 3"

    def stalled_s(self) -> float:
        return 0.0

    def silent_s(self) -> float:
        return self.silent

    def stacks(self) -> tuple[Any, ...]:
        return ()


HEADER = Header(nproc=2, args={"seed": "--seed {}", "data": "--data-root {}"}, reference_nproc=1, reference_args=("--fp32",))
