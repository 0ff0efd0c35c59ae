"""The verdict over 1,024 recorded ranks x 1,000 steps, made by replaying one real recording, and the controller's memory doing it."""

from __future__ import annotations

import json
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


def main() -> None:
    from harness.checks.engine import judge
    from harness.model import Ending, Plan, RankExit, Scenario
    from harness.probe import protocol
    from harness.record import Event, Recording, assemble, load_recordings

    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        real = next(r for r in load_recordings(record(Path(folder))) if r.num_rows)
    size = protocol.ROW.size
    offset, fmt = protocol.NUMBER_OFFSET["step"]
    rows = bytearray()
    for step in range(STEPS):
        one = bytearray(real.raw(step % real.num_rows))
        fmt.pack_into(one, offset, step)
        rows += one
    assert len(rows) == STEPS * size
    recordings = []
    for rank in range(RANKS):
        events = []
        for event in real.events:
            data = dict(event.data)
            if event.kind in ("start", "pg"):
                data |= {"rank": rank, "pid": 10_000 + rank} | ({"world_size": RANKS} if event.kind == "pg" else {})
            events.append(Event(event.kind, event.t_ns, event.step, json.loads(json.dumps(data))))
        recordings.append(Recording(f"0-{10_000 + rank}-1", events, bytes(rows), real.params))
    ending = Ending("exited", True, tuple(RankExit(r, 10_000 + r, 0, 1) for r in range(RANKS)))
    run = assemble(Plan("bench", Scenario("ddp_cifar", "ddp_cifar.py"), (), RANKS), recordings, ending=ending, num_cores=RANKS)
    begun = time.perf_counter()
    outcomes, findings = judge(run)
    took = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    crashed = [o.code for o in outcomes if o.kind.value == "crashed"]
    print(
        f"| verdict over {RANKS} ranks x {STEPS} steps | {took:.1f} s (bar 10) | peak {peak:.2f} GiB (bar 1) "
        f"| crashed {crashed or 'none'} | findings {[f.code for f in findings]} |"
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
