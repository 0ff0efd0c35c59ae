"""Runs on a real Slurm: the same verdict as locally, the same words for what goes wrong, and nothing left on any node."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Cluster, bring_up, interrupt

pytestmark = pytest.mark.timeout(240)
TASKS = ("--launcher", "slurm", "--slurm", "ranks=task", "--nodes", "2", "-n", "1")


def report(desk: Path, name: str = "latest") -> dict[str, Any]:
    document: dict[str, Any] = json.loads((desk / ".harness" / name / "report.json").read_text())
    return document


def codes(document: dict[str, Any]) -> list[str]:
    return [f["code"] for f in document["findings"] if f["severity"] != "advice"]


def hosts(run_dir: Path) -> dict[int, str]:
    """Which host each rank was on, as it says itself."""
    starts = [json.loads(path.read_text().splitlines()[0]) for path in sorted((run_dir / "rec").glob("*.jsonl"))]
    return {start["rank"]: start["host"] for start in starts}


def losses(document: dict[str, Any]) -> list[float]:
    return [rank["last_loss"] for rank in document["ranks"]]


def test_two_nodes_give_the_verdict_and_the_losses_of_one_machine(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "run", "tiny.py", "--launcher", "slurm", "--nodes", "2", "-n", "2", "--out", "slurm")
    assert code == 0, text
    there = json.loads((desk / "slurm" / "report.json").read_text())
    code, text = cluster.run(desk, "run", "tiny.py", "-n", "4", "--out", "here")
    assert code == 0, text
    here = json.loads((desk / "here" / "report.json").read_text())
    assert losses(there) == losses(here)
    assert [f["code"] for f in there["findings"]] == [f["code"] for f in here["findings"]]
    assert (there["verdict"], [r["rank"] for r in there["ranks"]]) == (here["verdict"], [0, 1, 2, 3])
    assert hosts(desk / "slurm") == {0: "n1", 1: "n1", 2: "n2", 3: "n2"}
    assert there["ending"]["left_behind"] == []
    cluster.nothing_left(str(desk))


def test_a_failing_rank_is_the_culprit_by_line(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "run", "tiny.py", *TASKS, "--", "raise")
    assert code == 1 and "error[LAU101]: rank-failed: rank 1 failed with ValueError: boom on rank 1" in text, text
    assert codes(report(desk)) == ["LAU101"]
    cluster.nothing_left(str(desk))


def test_a_killed_rank_under_an_agent_a_node(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "run", "tiny.py", "--launcher", "slurm", "--nodes", "2", "-n", "1", "--", "kill")
    assert code == 1 and "rank 1 was killed by SIGKILL" in text, text
    assert codes(report(desk)) == ["LAU102"]
    cluster.nothing_left(str(desk))


def test_scancel_ends_in_order_and_is_told(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "quick.py", *TASKS, "--", "sleep", "120")
    run.wait_for("all have met")
    cluster.client("scancel", run.job())
    code, text = run.end()
    assert code == 1 and codes(report(desk)) == ["LAU134"], text
    assert report(desk)["ending"]["scheduler"]["state"] == "CANCELLED"
    cluster.nothing_left(str(desk))


@pytest.mark.parametrize(
    ("word", "said"), [("partition=nope", "invalid partition specified: nope"), ("mem=999G", "Memory specification can not be satisfied")]
)
def test_what_slurm_refuses_is_a_finding_and_4(cluster: Cluster, desk: Path, word: str, said: str) -> None:
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, "--slurm", word)
    assert code == 4 and "error[LAU131]" in text and said in text, text


def test_sbatch_variables_of_the_user_hold_but_for_what_was_typed(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, SBATCH_PARTITION="nope")
    assert code == 4 and "invalid partition specified: nope" in text, text
    waits = ("--slurm", "partition=urgent", "--slurm", "begin=now+1hour", "--max-pending", "1")
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, *waits, SBATCH_PARTITION="nope", SBATCH_TIMELIMIT="17")
    job = re.search(r"scancel (\d+);", text)
    assert code == 4 and "LAU132" in text and job, text
    shown = cluster.client("scontrol", "-o", "show", "job", job[1])
    assert "Partition=urgent" in shown and "TimeLimit=00:17:00" in shown


def test_a_job_that_cannot_start_is_cancelled_after_max_pending(cluster: Cluster, desk: Path) -> None:
    """And its folder, pickles and all, is its owner's alone."""
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, "--slurm", "begin=now+1hour", "--max-pending", "2")
    assert code == 4 and "error[LAU132]" in text and "BeginTime" in text, text
    assert cluster.client("squeue", "-h").strip() == ""
    run_dir = (desk / ".harness" / "latest").resolve()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (run_dir, run_dir / "slurm", run_dir / "nodes"))
    pickles = list(run_dir.rglob("*.pkl"))
    assert pickles and all(path.parent == run_dir / "slurm" and path.stat().st_mode & 0o077 == 0 for path in pickles)


def test_a_job_that_cannot_end_before_its_deadline_is_told_so(cluster: Cluster, desk: Path) -> None:
    """n1 is taken, so the start comes too late for a minute's work."""
    taken = cluster.client("sbatch", "--parsable", "-o", "/dev/null", "-w", "n1", "--exclusive", "--wrap", "sleep 120").strip()
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, "--slurm", "nodelist=n1,n2", "--slurm", "time=1", "--slurm", "deadline=now+63seconds")
    cluster.client("scancel", taken)
    assert code == 4 and "Slurm ended the job at its deadline (DEADLINE)" in text, text


def test_ctrl_c_leaves_the_job_and_attach_comes_back(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "tiny.py", *TASKS, "--", "wait", "go-on")
    run.wait_for("at step 10")
    interrupt(run)
    code, text = run.end(30)
    assert code == 130 and "goes on without us; come back with: harness attach" in text, text
    assert report(desk)["status"] == "detached"
    assert cluster.client("squeue", "-h").strip() != ""
    code, text = cluster.run(desk, "report")
    assert "still goes on" in text, text
    back = cluster.start(desk, "attach")
    back.job()
    (desk / "go-on").touch()
    code, text = back.end()
    assert code == 0 and codes(report(desk)) == [], text
    assert report(desk)["ranks"][0]["num_steps"] == 40


def test_a_second_ctrl_c_cancels(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "quick.py", *TASKS, "--", "sleep", "120")
    run.wait_for("all have met")
    interrupt(run)
    run.wait_for("Ctrl-C again cancels")
    interrupt(run)
    code, text = run.end(60)
    assert code == 130 and "interrupted" in text, text
    cluster.nothing_left(str(desk))


def exits(desk: Path) -> list[int]:
    return [rank["code"] for rank in report(desk)["ending"]["exits"]]


def test_a_killed_controller_leaves_the_job_to_attach(cluster: Cluster, desk: Path) -> None:
    run = cluster.start(desk, "run", "quick.py", *TASKS)
    run.job()
    run.process.kill()
    run.process.wait()
    code, text = cluster.run(desk, "attach", "latest")
    assert code == 5 and report(desk)["status"] == "done" and exits(desk) == [0, 0], text  # 5: no torch, so nothing can be checked


def test_a_detached_run_is_left_at_once(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, "--detach", "--", "wait", "go-on")
    assert code == 5 and "goes on without us; come back with: harness attach" in text, text
    (desk / "go-on").touch()
    code, text = cluster.run(desk, "attach")
    assert code == 5 and report(desk)["status"] == "done" and exits(desk) == [0, 0], text


def test_hostile_paths_and_an_array_of_six(cluster: Cluster, tmp_path: Path) -> None:
    """Spaces, quotes, percent signs and letters beyond ASCII in every path; scripts without torch, so that six of them cost little."""
    desk = tmp_path / "it's a \"100 % \" Übung $HOME"
    desk.mkdir()
    names = [f"tâche {number} 'x'.py" for number in range(6)]
    for name in names:
        (desk / name).write_text(f"import os, sys\nprint('out', os.environ['RANK'], sys.argv[1:], {name!r})\n")
    code, text = cluster.run(desk, "run", *(f"./{name}" for name in names), *TASKS)
    assert code == 5, text  # no torch, so nothing can be checked
    reports = [json.loads(path.read_text()) for path in sorted((desk / ".harness").glob("2*/report.json"))]
    assert len(reports) == 6
    jobs = {r["ending"]["scheduler"]["job_id"] for r in reports}
    assert len({job.split("_")[0] for job in jobs}) == 1 and {job.split("_")[1] for job in jobs} == set("012345")
    for r in reports:
        assert [e["code"] for e in r["ending"]["exits"]] == [0, 0] and r["verdict"] == "nothing checked"
    logs = sorted(path.read_text() for path in (desk / ".harness").glob("2*/logs/rank1.log"))
    assert logs == sorted(f"out 1 [] {name}\n" for name in names)


def test_too_much_memory_is_named_with_its_rank(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, "--slurm", "mem=500M", "--", "eat")
    assert code == 1 and "rank 1 was killed by the kernel because memory ran out" in text, text
    assert codes(report(desk)) == ["LAU103"], text
    cluster.nothing_left(str(desk))


def test_a_site_profile_with_modules_and_a_gpu_a_task(cluster: Cluster, desk: Path) -> None:
    (desk / "pyproject.toml").write_text('[tool.harness.site.alpha]\npartition = "urgent"\nmodules = ["cuda/12.4"]\nranks = "task"\ngpus-of = "task"\n')
    words = ("--site", "alpha", "--launcher", "slurm", "--nodes", "1", "-n", "2", "--device", "cuda")
    module = {"BASH_FUNC_module%%": '() { [ "$1 $2" = "load cuda/12.4" ] && export LOADED=$2; }'}
    header = '# /// script\n# [tool.harness.args]\n# device = "--device {}"\n# ///\n'
    (desk / "gpus.py").write_text(header + (desk / "quick.py").read_text())
    code, text = cluster.run(desk, "run", "gpus.py", *words, **module)
    assert code == 5 and exits(desk) == [0, 0], text
    said = (desk / ".harness" / "latest" / "logs" / "rank1.log").read_text()
    assert said in ("out 1 0 0 cuda/12.4\n", "out 1 0 1 cuda/12.4\n"), said  # LOCAL_RANK 0: the one GPU that it sees is device 0
    job = report(desk)["ending"]["scheduler"]["job_id"]
    assert "Partition=urgent" in cluster.client("scontrol", "-o", "show", "job", job)


def test_a_module_that_cannot_be_loaded_is_what_is_said(cluster: Cluster, desk: Path) -> None:
    module = {"BASH_FUNC_module%%": '() { echo "no module $2 here" >&2; return 1; }'}
    code, text = cluster.run(desk, "run", "quick.py", *TASKS, "--slurm", "modules=cuda/99", **module)
    assert code == 4 and "no module cuda/99 here" in text and codes(report(desk)) != ["LAU138"], text


def test_inside_an_allocation_it_is_a_step_of_it(cluster: Cluster, desk: Path) -> None:
    words = ["salloc", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--gpus-per-node=2"]
    ours = ["run", "quick.py", "--launcher", "slurm", "--nodes", "2", "-n", "1", "--slurm", "ranks=task"]
    done = subprocess.run(
        [*words, sys.executable, "-m", "harness", *ours], cwd=desk, env=cluster.env, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 5 and exits(desk) == [0, 0], done.stdout + done.stderr
    assert "a step of its allocation" in done.stdout
    assert (desk / ".harness" / "latest" / "logs" / "rank1.log").read_text() == "out 1 0 0,1 None\n"  # all GPUs that the job has on the node
    assert not (desk / ".harness" / "latest" / "slurm" / "job.json").exists()
    cluster.nothing_left(str(desk))


def test_a_batch_script_to_copy_runs_and_its_output_is_the_report(cluster: Cluster, desk: Path) -> None:
    code, text = cluster.run(desk, "sbatch", "tiny.py", "--nodes", "2", "-n", "1", "--slurm", "ranks=task")
    assert code == 0
    (desk / "job.sh").write_text(text)
    job = subprocess.run(["sbatch", "--parsable", "job.sh"], cwd=desk, env=cluster.env, capture_output=True, text=True, timeout=20).stdout.strip()
    state = cluster.ended(job)
    said = "".join(path.read_text() for path in desk.glob("harness-tiny-*.log"))
    assert state == "COMPLETED" and "verdict     sane" in said, f"{state}\n{said}"


def test_without_accounting_all_is_the_same(cluster: Cluster, desk: Path) -> None:
    plain = bring_up("--nodes", "2", "--no-accounting")
    try:
        run = plain.start(desk, "run", "quick.py", *TASKS, "--", "raise")
        code, text = run.end()
        assert code == 1 and codes(report(desk)) == ["LAU101"], text
    finally:
        plain.stop()
        shutil.rmtree(plain.folder, ignore_errors=True)


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_sigterm_to_the_controller_cancels(cluster: Cluster, desk: Path, number: int) -> None:
    run = cluster.start(desk, "run", "quick.py", *TASKS, "--slurm", "begin=now+1hour")
    run.job()
    run.process.send_signal(number)
    code, text = run.end(60)
    assert code == 143, text
    assert cluster.client("squeue", "-h").strip() == ""
