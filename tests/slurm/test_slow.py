"""What takes minutes on a real Slurm: its own limits, nodes that crash, preemption, memory, every scenario. Run by scripts/reliability-slurm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT, Cluster
from test_core import TASKS, codes, losses, report

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_slurms_time_limit_is_the_wall_limit(cluster: Cluster, desk: Path) -> None:
    """Slurm looks at limits every 30 s, so a minute takes up to 90 s."""
    code, text = cluster.run(desk, "run", "tiny.py", *TASKS, "--slurm", "time=1", "--", "sleep", "300")
    assert code == 1 and "Slurm ended the job at its time limit (TIMEOUT)" in text, text
    assert codes(report(desk)) == ["LAU124"]
    cluster.nothing_left(str(desk))


def test_too_much_memory_is_named_with_its_rank(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "run", "tiny.py", *TASKS, "--slurm", "mem=2G", "--", "eat")
    assert code == 1 and "rank 1 was killed by the kernel because memory ran out" in text, text
    assert codes(report(desk)) == ["LAU103"]
    cluster.nothing_left(str(desk))


def test_a_node_that_crashes_is_named(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "tiny.py", *TASKS, "--slurm=--no-requeue", "--slurm", "nodelist=n3,n4", "--", "sleep", "400")
    run.wait_for("at step 10")
    try:
        cluster.control("kill-node", "n4")
        code, text = run.end(180)
    finally:
        cluster.control("start-node", "n4")
    assert code == 1 and "error[LAU133]: node-failed: a node failed under the job: n4; rank 1 went with it" in text, text
    assert codes(report(desk)) == ["LAU133"]
    cluster.nothing_left(str(desk))
    _wait_idle(cluster)


def test_a_job_on_a_crashed_node_is_followed_to_other_nodes(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "tiny.py", *TASKS, "--slurm=--requeue", "--slurm", "exclude=n1", "--", "sleep-first", "400")
    run.wait_for("at step 10")
    try:
        cluster.control("kill-node", "n2")
        code, text = run.end(240)
    finally:
        cluster.control("start-node", "n2")
    assert code == 0 and "the job was requeued once; attempt 2 is the one that was judged" in text, text
    document = report(desk)
    assert document["ending"]["scheduler"]["attempt"] == 1 and [r["num_steps"] for r in document["ranks"]] == [40, 40]
    cluster.nothing_left(str(desk))
    _wait_idle(cluster)


def test_a_preempted_job_is_followed_and_its_first_attempt_is_not_read(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "tiny.py", *TASKS, "--slurm", "partition=scavenge", "--slurm=--exclusive", "--", "sleep-first", "400")
    run.wait_for("at step 10")
    urgent = cluster.client("sbatch", "--parsable", "-p", "urgent", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 3").strip()
    code, text = run.end(240)
    assert urgent and code == 0 and "put job" in text and "advice[LAU137]" in text, text
    document = report(desk)
    assert document["ending"]["scheduler"]["attempt"] == 1 and [r["num_steps"] for r in document["ranks"]] == [40, 40]
    first = desk / ".harness" / "latest" / "rec"
    assert list(first.glob("*.jsonl")), "the first attempt's recordings are kept apart, not removed"
    cluster.nothing_left(str(desk))


def test_a_requeue_from_outside_is_followed(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "tiny.py", "--launcher", "slurm", "--nodes", "2", "-n", "1", "--", "sleep-first", "400")
    run.wait_for("at step 10")
    cluster.client("scontrol", "requeue", run.job())
    code, text = run.end(240)
    assert code == 0 and report(desk)["ending"]["scheduler"]["attempt"] == 1, text


def test_a_hang_is_seen_across_nodes(cluster: Cluster, desk: Path) -> None:
    (desk / "hang.py").write_text((desk / "tiny.py").read_text().replace('if what == "sleep":', "if rank == 1:").replace("float(more)", "600"))
    code, text = cluster.run(desk, "run", "hang.py", *TASKS, "--hang-timeout", "8")
    assert code == 1 and "rank 0" in text and "all_reduce" in text, text
    assert any(c.startswith("HNG") for c in codes(report(desk))), text
    cluster.nothing_left(str(desk))


NOBODY = 65534


def second_user() -> int | None:
    """Another user, where one can run this Python; else None: two runs of one user."""
    try:
        tried = subprocess.run([sys.executable, "-c", "import harness"], user=NOBODY, capture_output=True, cwd="/")
    except OSError:
        return None
    return NOBODY if tried.returncode == 0 else None


def test_two_users_side_by_side(cluster: Cluster, desk: Path) -> None:
    """The same script at once, each in a folder of its own: ports, folders and names do not meet, and neither can read the other's."""
    user = second_user()
    owner = os.getuid() if user is None else user
    other = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        shutil.copy(desk / "tiny.py", other / "tiny.py")
        os.chown(other, owner, owner)
        first, second = cluster.start(desk, "run", "tiny.py", *TASKS), cluster.start(other, "run", "tiny.py", *TASKS, user=user, HOME=str(other))
        for run in (first, second):
            code, text = run.end(240)
            assert code == 0, text
        assert losses(report(desk)) == losses(report(other))
        run_dir = (other / ".harness" / "latest").resolve()
        assert {path.stat().st_uid for path in run_dir.rglob("*")} == {owner}
        assert run_dir.stat().st_mode & 0o077 == 0
    finally:
        shutil.rmtree(other)


@pytest.mark.timeout(2400)
def test_every_scenario_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """hogwild is for one node: its ranks share memory."""
    names = sorted(path.stem for path in (ROOT / "scenarios").glob("*.py") if path.stem != "hogwild")
    words = ("--launcher", "slurm", "--nodes", "2", "-n", "2", "--no-reference", "--slurm", "parallel=1")
    code, text = cluster.start(tmp_path, "run", *names, *words).end(2000)
    alone, said = cluster.start(tmp_path, "run", "hogwild", "--launcher", "slurm", "--no-reference").end(300)
    assert alone == 0, said
    reports = {r["name"]: r for r in (json.loads(path.read_text()) for path in (tmp_path / ".harness").glob("2*/report.json"))}
    assert set(reports) == {path.stem for path in (ROOT / "scenarios").glob("*.py")}
    assert {name: r["verdict"] for name, r in reports.items() if r["verdict"] != "sane"} == {}, text[-3000:]
    assert code == 0


def _wait_idle(cluster: Cluster) -> None:
    import time

    until = time.monotonic() + 60
    while cluster.client("sinfo", "-h", "-p", "debug", "-t", "idle", "-o", "%D").strip() != "4":
        assert time.monotonic() < until, cluster.client("sinfo", "-N", "-l")
        time.sleep(0.5)
