"""A host is cut off in mid-run, or comes back: what the verdict has to say. One row a case, for test_partition.py and scripts/reliability."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conftest import TINY, Cluster, wait_idle

NUM_NODES, VICTIM = 3, "n2"
CUT_AFTER_S = 0.6  # behind step 10: a step takes 0.3 s from there on, and nine seconds of steps are left


@dataclass(frozen=True)
class CutCase:
    name: str
    words: tuple[str, ...]
    codes: tuple[str, ...]  # of all findings above advice; none: the run goes on to a good end
    says: str = ""
    back_after_s: float | None = None
    bound_s: float = 60.0  # from the cut to the verdict


@dataclass
class Seen:
    exit_code: int
    text: str
    report: dict[str, Any]
    verdict_after_s: float


HUNG_S = 8.0 + 5.0 + 5.0  # the hang timeout; the grace, because an agent that is cut off waits for its store till the end; 5 s after that
HANG = ("--nodes", "3", "-n", "1", "--hang-timeout", "8")
CASES = (
    CutCase("host_cut_off", HANG, ("HNG107",), "host-cut-off: host n2 no longer answers the others", bound_s=HUNG_S),
    CutCase(
        "host_cut_off_of_two",
        ("--nodes", "2", "-n", "1", "--hang-timeout", "8", "--slurm", "ranks=task"),
        ("HNG107",),
        "hosts n1 and n2 no longer reach each other",
        bound_s=HUNG_S,
    ),
    CutCase("host_comes_back", ("--nodes", "3", "-n", "1"), (), back_after_s=3.0),
    CutCase(
        "host_cut_off_until_slurm_notices",
        ("--nodes", "2", "-n", "1", "--hang-timeout", "300", "--slurm=--no-requeue"),
        ("LAU133",),
        "a node failed under the job: n2; rank 1 went with it",
        bound_s=90.0,
    ),
)


def desk_in(parent: Path) -> Path:
    desk = Path(tempfile.mkdtemp(dir=parent))
    shutil.copy(TINY, desk / "tiny.py")
    return desk


def play(cluster: Cluster, desk: Path, case: CutCase) -> Seen:
    """tiny.py lies in `desk`. The host is on the network again when this returns."""
    wait_idle(cluster, NUM_NODES)
    run = cluster.start(desk, "run", "tiny.py", "--launcher", "slurm", *case.words, "--", "pace", "0.3")
    run.wait_for("at step 10")
    time.sleep(CUT_AFTER_S)
    try:
        cluster.control("cut-node", VICTIM)
        begun = time.monotonic()
        if case.back_after_s is not None:
            time.sleep(case.back_after_s)
            cluster.control("join-node", VICTIM)
        code, text = run.end(180)
        took_s = time.monotonic() - begun
    finally:
        cluster.control("join-node", VICTIM)
    return Seen(code, text, json.loads((desk / ".harness" / "latest" / "report.json").read_text()), took_s)


def crowded() -> float:
    """How many times slower this machine is than an idle one."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def misses(case: CutCase, seen: Seen) -> list[str]:
    """Everything in which the verdict is not what the table asks for."""
    found = tuple(f["code"] for f in seen.report["findings"] if f["severity"] in ("error", "warning"))
    steps = [rank["num_steps"] for rank in seen.report["ranks"]]
    return [
        f"{name} is {got!r}, not {want!r}"
        for name, got, want in (
            ("exit code", seen.exit_code, int(bool(case.codes))),
            ("what was found", found, case.codes),
            ("what it says", case.says in seen.text, True),
            ("steps", not case.codes and set(steps) != {40}, False),
            ("left behind", seen.report["ending"]["left_behind"], []),
            ("within the bound", seen.verdict_after_s <= case.bound_s * crowded(), True),
        )
        if got != want
    ]
