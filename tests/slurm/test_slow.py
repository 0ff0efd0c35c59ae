"""What takes minutes on a real Slurm: its own limits, nodes that crash, preemption. Run by scripts/reliability-slurm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Cluster, cluster_of, wait_idle
from test_core import TASKS, codes, report

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_slurms_time_limit_is_the_wall_limit(cluster: Cluster, desk: Path) -> None:
    """Slurm looks at limits every 30 s, so a minute takes up to 90 s."""
    code, text = cluster.run(desk, "run", "tiny.py", *TASKS, "--slurm", "time=1", "--", "sleep", "300")
    assert code == 1 and "Slurm ended the job at its time limit (TIMEOUT)" in text, text
    assert codes(report(desk)) == ["LAU124"]
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
    wait_idle(cluster, 4)


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
    wait_idle(cluster, 4)


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


def test_a_run_folder_that_one_node_does_not_share(cluster: Cluster, desk: Path) -> None:
    """n2 has a folder of its own in that place, as with /tmp or a local home; submitit waits a minute there for its pickle."""
    (desk / "shared").mkdir()
    cluster.inside("n2", "mount", "-t", "tmpfs", "none", str(desk / "shared"))
    try:
        code, text = cluster.run(desk, "run", "quick.py", *TASKS, "--slurm", "nodelist=n1,n2", "--out", "shared/run")
    finally:
        cluster.inside("n2", "umount", str(desk / "shared"))
    found = json.loads((desk / "shared" / "run" / "report.json").read_text())
    assert code in (1, 4) and codes(found) == ["LAU138"], text
    cluster.nothing_left(str(desk))


def test_a_requeue_from_outside_is_followed(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "tiny.py", "--launcher", "slurm", "--nodes", "2", "-n", "1", "--", "sleep-first", "400")
    run.wait_for("at step 10")
    cluster.client("scontrol", "requeue", run.job())
    code, text = run.end(240)
    assert code == 0 and report(desk)["ending"]["scheduler"]["attempt"] == 1, text


@contextlib.contextmanager
def asleep(node: str, resume: Path, resume_timeout_s: int) -> Iterator[Cluster]:
    """A cluster of two nodes, of which Slurm has switched off one; `resume`: the site's program that is to switch it on."""
    with cluster_of("--nodes", "2", "--no-accounting") as cluster:
        settings = f"SuspendProgram=/bin/true\nSuspendTime=100000\nSuspendTimeout=1\nResumeProgram={resume}\nResumeTimeout={resume_timeout_s}\n"
        with (cluster.folder / "etc/slurm.conf").open("a") as conf:
            conf.write(settings)
        cluster.client("scontrol", "reconfigure")
        cluster.client("scontrol", "update", f"nodename={node}", "state=power_down")
        cluster.control("kill-node", node)
        wait_node(cluster, node, "IDLE+POWERED_DOWN")
        yield cluster


def wait_node(cluster: Cluster, node: str, state: str, limit_s: float = 20.0) -> None:
    until = time.monotonic() + limit_s
    while f" State={state} " not in (said := cluster.client("scontrol", "-o", "show", "node", node)):
        assert time.monotonic() < until, said
        time.sleep(0.2)


POWERED = (*TASKS, "--slurm=--no-requeue")


def test_a_node_whose_boot_program_reports_failure_is_boot_fail(desk: Path) -> None:
    """The one way to BOOT_FAIL: a ResumeProgram that gives up hands the job back with JOB_RECONFIG_FAIL, and the job may not be requeued."""
    resume = desk / "resume"
    resume.write_text(RESUME.format(python=sys.executable, library=next(Path("/usr/lib").glob("*/slurm-wlm/libslurmfull.so"))))
    resume.chmod(0o755)
    with asleep("n2", resume, 300) as cluster:
        code, text = cluster.run(desk, "run", "tiny.py", *POWERED)
    assert code == 4 and "error[LAU133]: node-failed: a node did not boot" in text and "BOOT_FAIL" in text, text
    assert codes(report(desk)) == ["LAU133"] and report(desk)["ending"]["scheduler"]["state"] == "BOOT_FAIL"


def test_a_node_that_never_boots_is_named(desk: Path) -> None:
    """What most sites see: the node does not answer within ResumeTimeout, and Slurm says NODE_FAIL."""
    with asleep("n2", Path("/bin/true"), 10) as cluster:
        code, text = cluster.run(desk, "run", "tiny.py", *POWERED)
    assert code == 4 and "error[LAU133]: node-failed: a node failed" in text and "no rank had been started on it" in text, text
    assert codes(report(desk)) == ["LAU133"]


RESUME = """#!{python} -I
import ctypes, json, os
JOB_RECONFIG_FAIL = 1 << 17  # slurm.h
slurm = ctypes.CDLL("{library}", mode=ctypes.RTLD_GLOBAL)
slurm.slurm_init(None)
for job in json.load(open(os.environ["SLURM_RESUME_FILE"]))["jobs"]:
    slurm.slurm_requeue(job["job_id"], JOB_RECONFIG_FAIL)
"""


def test_a_hang_is_seen_across_nodes(cluster: Cluster, desk: Path) -> None:
    (desk / "hang.py").write_text((desk / "tiny.py").read_text().replace('if what == "sleep":', "if rank == 1:").replace("float(more)", "600"))
    code, text = cluster.run(desk, "run", "hang.py", *TASKS, "--hang-timeout", "8")
    assert code == 1 and "rank 0" in text and "all_reduce" in text, text
    assert any(c.startswith("HNG") for c in codes(report(desk))), text
    cluster.nothing_left(str(desk))


def test_tasks_that_are_each_alone_in_a_world_of_one(cluster: Cluster, desk: Path) -> None:
    """What comes of a script that does not take its rank from the environment."""
    alone = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
    (desk / "alone.py").write_text((desk / "tiny.py").read_text().replace('dist.init_process_group("gloo")', alone))
    code, text = cluster.run(desk, "run", "alone.py", *TASKS)
    assert code == 1 and "LAU110" in codes(report(desk)), text


def test_a_batch_script_without_us_is_a_plain_torchrun(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "sbatch", "tiny.py", "--nodes", "2", "-n", "2", "--bare")
    assert code == 0 and "harness" not in text.replace("harness-tiny", "")
    (desk / "train.sh").write_text(text)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = subprocess.run(["sbatch", "--parsable", "train.sh"], cwd=desk, env=cluster.env | path, capture_output=True, text=True, timeout=20).stdout.strip()
    state = cluster.ended(job, 300)
    said = "".join(path.read_text() for path in desk.glob("harness-tiny-*.log"))
    assert state == "COMPLETED" and said.count("at step 10") == 1, f"{state}\n{said}"


def test_a_batch_script_of_a_scenario_of_ours(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "sbatch", "ddp_cifar", "--nodes", "2", "-n", "2")
    assert code == 0
    (desk / "job.sh").write_text(text)
    state = cluster.ended(cluster.client("sbatch", "--parsable", f"--chdir={desk}", str(desk / "job.sh")).strip(), 500)
    said = "".join(path.read_text() for path in desk.glob("harness-ddp_cifar-*.log"))
    assert state == "COMPLETED" and "verdict     sane" in said, f"{state}\n{said}"
