"""What each launcher would start, exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.launch import command as commands
from harness.launch import job, spawn
from harness.launch.driver import command, launch_command
from harness.launch.rank_shim import RANK_PREFIX
from harness.model import Plan, Scenario
from harness.probe import protocol

PLAN = Plan("abc", Scenario("train", "./train.py"), ("--lr", "$1", ""), 2, launcher="torchrun", python="/py", env={"A": "1"})
RUN = Path("/runs/x")


def test_torchrun_is_the_real_command() -> None:
    argv, env = command(PLAN, RUN)
    assert argv[:4] == ["/py", "-P", "-m", "torch.distributed.run"]
    options = argv[4 : argv.index("--no-python")]
    assert dict(zip(options[::2], options[1::2], strict=True)) == {
        "--nnodes": "1",
        "--nproc-per-node": "2",
        "--max-restarts": "0",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "127.0.0.1:0",
        "--rdzv-id": "abc",
        "--local-addr": "127.0.0.1",
        "--log-dir": "/runs/x/logs/torchelastic",
    }
    rank = argv[argv.index("--no-python") + 1 :]
    assert rank[rank.index("--") :] == ["--", "/py", "-u", "./train.py", "--lr", "$$1", ""]  # the agent makes $1 of $$1
    assert env["A"] == "1" and env[protocol.ENV_RUN_ID] == "abc"
    assert protocol.ENV_RUN_DIR not in env and "PYTHONPATH" not in env  # the agent is not probed


def test_ranks_get_the_probe_and_the_marks() -> None:
    added = command(PLAN, RUN)[1]
    env = {name.removeprefix(RANK_PREFIX): value for name, value in added.items() if name.startswith(RANK_PREFIX)}
    assert env["PYTHONPATH"].split(":")[0].endswith("harness/probe/inject")
    assert (env[protocol.ENV_RUN_ID], env[protocol.ENV_RUN_DIR], env[protocol.ENV_INTERFACE]) == ("abc", "/runs/x", "lo")
    assert json.loads(env[protocol.ENV_EXPECT]) == {"nproc": 2, "nodes": 1, "script": "./train.py"}


@pytest.mark.parametrize(
    ("planned", "inherited", "path"),
    [({}, {}, []), ({}, {"PYTHONPATH": "/a:/b"}, ["/a", "/b"]), ({"PYTHONPATH": "/c"}, {"PYTHONPATH": "/a"}, ["/c"])],
)
def test_the_probe_stands_before_the_users_path(planned: dict[str, str], inherited: dict[str, str], path: list[str]) -> None:
    env = commands.rank_environment(replace(PLAN, env=planned), RUN, inherited)
    assert env["PYTHONPATH"].split(":")[1:] == path


def test_the_users_interface_is_kept() -> None:
    assert protocol.ENV_INTERFACE not in commands.rank_environment(PLAN, RUN, {"GLOO_SOCKET_IFNAME": "eth0"})


def test_warm_is_torchrun_with_other_interpreters(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    cold = launch_command(replace(PLAN, cwd=str(tmp_path)), RUN)
    warm = launch_command(replace(PLAN, cwd=str(tmp_path), launcher="warm"), RUN)
    assert warm.fallback == cold and warm.warmth is not None
    assert (warm.warmth.count, warm.warmth.preload, warm.warmth.env) == (2, ("torch",), {"A": "1"})
    agent = warm.argv[warm.argv.index("--") + 1 :]
    assert agent[2:] == tuple(word.replace("rank_shim.py", "warm_client.py") for word in cold.argv[4:])


def test_inline_runs_one_process() -> None:
    with pytest.raises(ValueError, match="launcher inline runs one process, not 2"):
        command(replace(PLAN, launcher="inline"), RUN)
    argv, env = command(replace(PLAN, launcher="inline", nproc=1), RUN)
    assert argv[-4:] == ["./train.py", "--lr", "$1", ""] and (env["RANK"], env["WORLD_SIZE"]) == ("0", "1")


@pytest.mark.parametrize("name", ["mpirun", "driver"])
def test_an_unknown_launcher(name: str) -> None:
    with pytest.raises(ValueError, match=f"no launcher '{name}'"):
        command(replace(PLAN, launcher=name), RUN)


def test_a_job_survives_the_pipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    launch = launch_command(replace(PLAN, cwd=str(tmp_path), launcher="warm"), RUN)
    line = job.job_line(PLAN, RUN, launch)
    assert line.count("\n") == 1
    assert job.parse_job(json.loads(line)) == job.Job("abc", "/runs/x", 2, 5.0, launch)


def test_what_an_older_job_left_behind_is_not_inherited() -> None:
    dirty = {"RANK": "3", "MASTER_PORT": "29500", "PET_NNODES": "4", "TORCHELASTIC_RUN_ID": "old", "HOME": "/h", "SLURM_JOB_ID": "7"}
    assert spawn.clean_environment(dirty) == {"HOME": "/h", "SLURM_JOB_ID": "7"}


def test_the_supervisor_imports_no_torch() -> None:
    code = "import sys; import harness.launch.supervisor; print(sorted({'torch', 'numpy', 'psutil', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
