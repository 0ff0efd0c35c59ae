"""`harness run` on real 2-process gloo runs: verdicts, exit codes, and losses that are the same with and without the probe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
import torch.distributed.nn.functional  # before the group: imported later it keeps the group, whose threads now and then abort the interpreter's end
{imports}

def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(128, 8), torch.randint(0, 3, (128,)))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers={workers})
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)))
    {after_wrap}
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    curve = []
    for epoch in range(3):
        {set_epoch}
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            curve.append(loss.item().hex())
    with open(f"{{os.environ['CURVE']}}.{{rank}}", "w") as f:
        f.write(" ".join(curve))
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


def script(imports: str = "", workers: int = 0, after_wrap: str = "", set_epoch: str = "sampler.set_epoch(epoch)") -> str:
    return TRAIN.format(imports=imports, workers=workers, after_wrap=after_wrap or "pass", set_epoch=set_epoch)


SCRIPTS = {
    "healthy": script(),
    "workers": script(workers=1),
    "compiled": script(after_wrap='model = torch.compile(model, backend="eager")'),
    "faulty": script(set_epoch="pass"),
    "own_package": script(imports="import harness\nassert harness.MINE, 'the project has its own harness package'"),
    "raises": script(after_wrap="if rank == 1: raise ValueError('as planned')"),
    "nothing": "print('no training here')\n",
    "spawns": "import torch.multiprocessing as mp\n"
    + script().replace("def main():", "def main(rank=0):").replace('init_process_group("gloo")', 'init_process_group("gloo", init_method="file://" + '
      'os.path.abspath("store"), rank=rank, world_size=2)').replace("    main()\n", "    mp.spawn(main, nprocs=2)\n"),
}  # fmt: skip


ABORTED = "terminate called without an active exception"  # torch's own, behind the script's last line: LAU102's page


def harness(folder: Path, *arguments: str, **env: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """`harness run`, its output and the reports it wrote."""
    out = folder / "out.json"
    command = [str(Path(sys.executable).with_name("harness")), "run", *arguments, "--format", "console", "--format", f"json={out}"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=170, check=False)
    report = json.loads(out.read_text()) if out.is_file() and out.stat().st_size else {"runs": []}
    return done, report.get("runs", [report])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    for name, source in SCRIPTS.items():
        (folder / f"{name}.py").write_text(source)
    (folder / "mine").mkdir()
    (folder / "mine" / "own_package.py").write_text(SCRIPTS["own_package"])
    (folder / "mine" / "harness").mkdir()
    (folder / "mine" / "harness" / "__init__.py").write_text("MINE = True\n")
    return folder


@pytest.fixture(scope="module")
def verdicts(project: Path) -> dict[str, dict[str, Any]]:
    """All the two-process scripts in one command: one set of warm servers."""
    names = ["healthy.py", "workers.py", "compiled.py", "faulty.py", "raises.py", "nothing.py"]
    done, reports = harness(project, *names, "-n", "2", CURVE=str(project / "with"))
    assert done.returncode == 1, done.stdout + done.stderr
    return {report["name"]: report for report in reports}


def codes(report: dict[str, Any]) -> list[str]:
    return [f["code"] for f in report["findings"] if f["severity"] != "advice"]


@pytest.mark.parametrize("name", ["healthy", "workers", "compiled"])
def test_a_healthy_script_is_sane(verdicts: dict[str, dict[str, Any]], name: str) -> None:
    assert codes(verdicts[name]) == []
    assert verdicts[name]["exit_code"] == 0


def test_the_compiler_does_not_look_into_the_probe(project: Path, verdicts: dict[str, dict[str, Any]]) -> None:
    """It would compile our hooks again at each step, and warn about them until its limit of recompiles is reached."""
    assert verdicts["compiled"]["ranks"]
    logs = [log.read_text() for log in (project / ".harness").glob("*-compiled/logs/rank*.log")]
    assert len(logs) == 2
    assert not any(words in log for log in logs for words in ("recompile_limit", "does not know how to trace", "harness/probe"))


def test_the_fault_is_named_at_its_line(verdicts: dict[str, dict[str, Any]]) -> None:
    assert codes(verdicts["faulty"]) == ["DAT101"]
    assert verdicts["faulty"]["findings"][0]["where"]["text"] == "for x, y in loader:"


def test_a_failing_rank_is_the_culprit_and_its_peer_is_not(verdicts: dict[str, dict[str, Any]]) -> None:
    report = verdicts["raises"]
    assert codes(report) == ["LAU101"]
    assert report["findings"][0]["ranks"] == [1]
    assert "as planned" in report["findings"][0]["message"]


def test_a_script_without_training_is_not_sane(verdicts: dict[str, dict[str, Any]]) -> None:
    assert verdicts["nothing"]["exit_code"] == 5


@pytest.mark.parametrize("name", ["healthy", "workers"])
def test_losses_are_bit_identical_without_the_probe(project: Path, verdicts: dict[str, dict[str, Any]], name: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"{name}.py"]
    env = {**os.environ, "CURVE": str(project / f"bare_{name}"), "OMP_NUM_THREADS": "1"}
    for _ in range(3):
        bare = subprocess.run(command, cwd=project, env=env, check=False, capture_output=True, text=True, timeout=170)
        if ABORTED not in bare.stderr:
            break
    assert bare.returncode == 0, bare.stderr
    done, _ = harness(project, f"{name}.py", "-n", "2", "--launcher", "torchrun", CURVE=str(project / f"probed_{name}"))
    assert done.returncode == 0, done.stdout
    for rank in (0, 1):
        curve = (project / f"bare_{name}.{rank}").read_text()
        assert len(curve.split()) == 24
        assert (project / f"probed_{name}.{rank}").read_text() == curve


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nproc", "launchers"), [("2", ("warm", "torchrun")), ("1", ("warm", "torchrun", "inline"))])
def test_every_launcher_gives_the_same_ranks_losses_and_verdict(project: Path, nproc: str, launchers: tuple[str, ...]) -> None:
    seen = []
    for launcher in launchers:
        curve = project / f"curve_{launcher}_{nproc}"
        done, (report,) = harness(project, "healthy.py", "-n", nproc, "--launcher", launcher, CURVE=str(curve))
        assert done.returncode == 0, done.stdout + done.stderr
        recordings = sorted((project / ".harness" / "latest" / "rec").glob("*.jsonl"))
        starts = [next(e for line in path.read_text().splitlines() if (e := json.loads(line))["k"] == "start") for path in recordings]
        seen.append(
            {
                "ranks": sorted((e["rank"], e["local_rank"], e["world_size"]) for e in starts),
                "steps": [(r["rank"], r["reported"], r["num_steps"], r["first_loss"].hex(), r["last_loss"].hex()) for r in report["ranks"]],
                "curves": [Path(f"{curve}.{rank}").read_text() for rank in range(int(nproc))],
                "device": (report["device"], report["backend"]),
                "verdict": (report["verdict"], report["exit_code"], codes(report)),
                "ran": [c["code"] for c in report["checks"] if c["outcome"] == "ran" and not c["code"].startswith(("PRF", "MEM"))],
            }
        )
    assert len(seen[0]["curves"][0].split()) == 48 // int(nproc)
    for launcher, each in zip(launchers, seen, strict=True):
        assert each == seen[0], launcher


def test_a_project_may_have_its_own_harness_package(project: Path) -> None:
    done, reports = harness(project / "mine", "own_package.py", "-n", "2", CURVE=str(project / "own"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert codes(reports[0]) == []


def test_a_script_that_spawns_its_own_ranks_is_judged_as_a_world_of_two(project: Path) -> None:
    done, reports = harness(project, "spawns.py", "-n", "1", CURVE=str(project / "spawned"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(reports[0]["ranks"]) == 2


def test_a_rank_that_shuts_the_probe_out_is_not_sane(project: Path) -> None:
    (project / "isolated.py").write_text(
        "import os, sys\nif not sys.flags.isolated:\n    os.execv(sys.executable, [sys.executable, '-I', __file__])\n"
    )
    done, reports = harness(project, "isolated.py", "-n", "2")
    assert done.returncode == reports[0]["exit_code"] == 1
    assert codes(reports[0]) == ["LAU121"] and "ranks 0-1 did not report" in reports[0]["findings"][0]["message"]


def test_each_switch_of_the_users_is_seen_once_whatever_stands_around_it(tmp_path: Path) -> None:
    """By eval() and by train(False), of the wrapper and of the model inside; not torch's own way down into the children. Several sensors wrap both calls."""
    switches = "model.eval(); model.train(); model.module.eval(); model.module.train(False); model.train()"
    (tmp_path / "train.py").write_text(script(after_wrap=switches))
    harness(tmp_path, "train.py", "-n", "2", "--no-reference", CURVE=str(tmp_path / "curve"))
    recordings = list((tmp_path / ".harness" / "latest" / "rec").glob("*.jsonl"))
    assert len(recordings) == 2
    for path in recordings:
        events = [json.loads(line) for line in path.read_text().splitlines()]
        told = [(e["training"], e["module"]) for e in events if e["k"] == "mode"]
        net, ddp = "Sequential", "DistributedDataParallel"
        assert told == [(False, ddp), (True, ddp), (False, net), (False, net), (True, ddp)]
