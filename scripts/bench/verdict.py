"""The verdict over 1,024 recorded ranks x 1,000 steps, made from one real recording: reading, judging, and the memory it takes."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import HARNESS, ROOT, machine

RANKS, STEPS = 1024, 1000


def record(folder: Path) -> Path:
    """A real run of two ranks; its recording is what is multiplied."""
    command = [
        HARNESS,
        "run",
        str(ROOT / "scenarios" / "ddp_cifar.py"),
        "--no-reference",
        "--out",
        str(folder / "real"),
        "--",
        "--steps",
        "40",
    ]
    subprocess.run(command, cwd=folder, check=False, stdout=subprocess.DEVNULL)
    return folder / "real" / "rec"


def multiply(real: Path, rec: Path) -> None:
    """Writes the recording of one real rank as those of RANKS ranks with STEPS steps; every rank has stamps, a pid and a rank of its own."""
    from harness.probe import protocol

    rows = real.with_suffix(".rows").read_bytes()[len(protocol.ROWS_MAGIC) :]
    size = protocol.ROW.size
    offset, fmt = protocol.NUMBER_OFFSET["step"]
    number, loss = len(rows) // size, protocol.NUMBER_OFFSET["loss"]
    table = bytearray()
    for step in range(STEPS):
        one = bytearray(rows[step % number * size : (step % number + 1) * size])
        fmt.pack_into(one, offset, step)
        table += one
    events = [json.loads(line) for line in real.read_bytes().splitlines()]
    for event in events:
        if event["k"] == "end":
            event["steps"] = STEPS
    rec.mkdir(parents=True)
    for rank in range(RANKS):
        for at in range(0, len(table), size):
            loss[1].pack_into(table, at + loss[0], random.random())
        lines = []
        for event in events:
            own = {"rank": rank, "pid": 10_000 + rank} if event["k"] in ("start", "pg") else {}
            world = {"world_size": RANKS} if event["k"] == "pg" else {}
            lines.append(json.dumps({**event, **own, **world, "t": event["t"] + rank}, separators=(",", ":")))
        stem = rec / f"0-{10_000 + rank}-1"
        stem.with_suffix(".jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        stem.with_suffix(".rows").write_bytes(protocol.ROWS_MAGIC + table)
        stem.with_suffix(".params").write_bytes(real.with_suffix(".params").read_bytes())


def verdict(rec: Path) -> None:
    """In a process of its own, so that its peak is the reading's and the judging's."""
    from harness.assembly import assemble
    from harness.checks.engine import judge
    from harness.model import Ending, Plan, RankExit, Scenario
    from harness.record import load_recordings

    begun = time.perf_counter()
    recordings = load_recordings(rec)
    read = time.perf_counter()
    ending = Ending("exited", True, tuple(RankExit(r, 10_000 + r, 0, 1) for r in range(len(recordings))))
    plan = Plan("bench", Scenario("ddp_cifar", "ddp_cifar.py"), (), len(recordings))
    run = assemble(plan, recordings, ending=ending, num_cores=len(recordings))
    outcomes, findings = judge(run)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    crashed = [o.code for o in outcomes if o.kind.value == "crashed"]
    damaged = sum(bool(r.damage) for r in recordings)
    print(
        f"| verdict over {run.world_size} ranks x {run.num_steps} steps | {done - begun:.1f} s, {read - begun:.1f} of them reading (bar 10) "
        f"| CPU {time.process_time():.1f} s | peak {peak:.2f} GiB (bar 1) | crashed {crashed or 'none'}, damaged {damaged} | findings {[f.code for f in findings]} |"
    )


def main() -> None:
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        real = max(record(Path(folder)).glob("*.jsonl"), key=lambda p: p.with_suffix(".rows").stat().st_size if p.with_suffix(".rows").exists() else 0)
        multiply(real, Path(folder) / "many" / "rec")
        subprocess.run([sys.executable, __file__, str(Path(folder) / "many" / "rec")], check=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    RANKS = int(sys.argv[2]) if len(sys.argv) > 2 else RANKS
    verdict(Path(sys.argv[1])) if len(sys.argv) == 2 else main()
