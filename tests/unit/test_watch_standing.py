"""Where the ranks of a Slurm job stand: asked through the folder of its latest attempt, and who lives is what the nodes say."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from harness import attempt
from harness.model import Plan, Scenario, Slurm
from harness.probe import protocol
from harness.watch import standing

PLAN = Plan("abc", Scenario("train", "train.py"), (), 1, nodes=2, launcher="slurm", slurm=Slurm())
STRANGER = 2**22 + 5  # a pid that this host cannot have


def rank_of(folder: Path, number: int) -> Path:
    stem = f"{number}-{STRANGER + number}-9"
    head = protocol.STATUS.pack(2, STRANGER + number, 1, 1, 7, 1, b"train", b"all_reduce", 0)
    (folder / protocol.REC_DIR / f"{stem}.status").write_bytes(head + b"train.py:7:main".ljust(protocol.STATUS_SITE_BYTES, b"\0"))
    path = folder / protocol.REC_DIR / f"{stem}.jsonl"
    path.write_text(json.dumps({"k": "start", "rank": number, "ppid": 1}) + "\n")
    attempt.write_note(folder / attempt.NODES_DIR / f"{number}.pulse", json.dumps({"beat": 1, "cpu_s": {f"{STRANGER + number}-9": 1.0}}))
    return path


def test_ranks_on_other_hosts_live_as_long_as_their_nodes_say_so(tmp_path: Path) -> None:
    attempt.make(tmp_path, 0)
    folder = attempt.make(tmp_path, 1)
    recordings = [rank_of(folder, number) for number in range(2)]

    def answers() -> None:
        while not (folder / protocol.STACKS_REQUEST).exists():
            time.sleep(0.01)
        request = (folder / protocol.STACKS_REQUEST).read_text()
        frames = [{"file": "train.py", "line": 7, "func": "main", "text": "x"}]
        for path in recordings:
            with path.open("a") as events:
                events.write(json.dumps({"k": "stacks", "request": request, "threads": {"MainThread": frames}}) + "\n")

    thread = threading.Thread(target=answers)
    thread.start()
    found = standing.ask(tmp_path, PLAN)
    thread.join()
    assert [(one.rank, one.alive, one.op, list(one.threads)) for one in found] == [(r, True, "all_reduce", ["MainThread"]) for r in range(2)]
