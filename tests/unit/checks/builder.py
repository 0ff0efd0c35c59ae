"""Small runs made by hand: events, rows, recordings, a run. What a test does not state has a harmless default."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from harness.assembly import assemble
from harness.checks.base import Check, Inconclusive, NotApplicable
from harness.model import Ending, Finding, Plan, RankExit, Scenario
from harness.probe import protocol
from harness.record import Event, Recording, Run

_clock = [1_000_000_000]


def site(line: int = 10, text: str = "do()", file: str = "/home/u/train.py", func: str = "main") -> dict[str, Any]:
    return {"file": file, "line": line, "func": func, "text": text}


def event(kind: str, /, *, t: int | None = None, s: int = 0, y: int = 0, line: int | None = None, **fields: Any) -> Event:
    """One event; time moves on by 1 ms from event to event unless `t` says otherwise. `line` gives it a site."""
    _clock[0] += 1_000_000
    data: dict[str, Any] = {"k": kind, "t": t if t is not None else _clock[0], "s": s, "y": y, **fields}
    if line is not None:
        data.setdefault("site", site(line))
    return Event(kind, data["t"], s, data)


def row(step: int, **fields: Any) -> bytes:
    """One packed step row."""
    values: dict[str, Any] = dict.fromkeys(protocol.ROW_FIELDS, 0)
    values |= {
        "step": step,
        "t_ns": 1_000_000_000 + step * 10_000_000,
        "seq": -1,
        "num_backward": 1,
        "loss": 1.0,
        "lr": 0.1,
        "grad_norm": math.nan,
    }
    return protocol.ROW.pack(*(values | fields).values())


def recording(
    events: Iterable[Event] = (), rows: Iterable[bytes] = (), *, rank: int = 0, pid: int | None = None, ppid: int = 1, **start: Any
) -> Recording:
    """One process; a start event is put in front. Keywords go into the start event (role="child", host=...)."""
    fields = {
        "pid": 1000 + rank if pid is None else pid,
        "ppid": ppid,
        "rank": rank,
        "role": "main",
        "host": "a",
        "argv": ["train.py"],
    } | start
    return Recording(f"0-{fields['pid']}-1", [event("start", t=1, **fields), *events], b"".join(rows))


def run(recordings: Sequence[Recording], *, exits: Sequence[int] = (), reason: str = "exited", live: bool = False, **plan: Any) -> Run:
    """A run of these processes; exit code 0 for each launched rank unless `exits` says otherwise."""
    mains = [r for r in recordings if r.role == "main"]
    num = int(plan.pop("nproc", max(1, len(mains))))
    logs = plan.pop("logs", {})
    codes = list(exits) or [0] * num
    ending = Ending(reason, True, tuple(RankExit(r, 1000 + r, code, 2) for r, code in enumerate(codes)))
    return assemble(Plan("t", Scenario("train", "train.py"), (), num, **plan), list(recordings), ending=ending, live=live, logs=logs)


def findings(check: type[Check], of: Run) -> list[Finding]:
    """What one check says of a run; not applicable and inconclusive are nothing to say."""
    one = check()
    try:
        one.begin(of)
        for step in of.steps():
            one.step(step)
        return list(one.end(of))
    except (NotApplicable, Inconclusive):
        return []
