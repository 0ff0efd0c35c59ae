"""From what was typed to a plan: what reaches the script, and what is refused before any process is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from controller_samples import HEADER

from harness import planning
from harness.errors import UsageError
from harness.model import Header, Scenario
from harness.planning import Job, clean_environment, expand_codes, make_job
from harness.settings import resolve

SCENARIO = Scenario("train", "train.py", HEADER)
BARE = Scenario("train", "train.py", Header())


def job(
    cwd: Path, scenario: Scenario = SCENARIO, script_args: tuple[str, ...] = (), environ: Mapping[str, str] | None = None, **flags: Any
) -> Job:
    settled = resolve(flags, environ or {}, cwd)
    return make_job(scenario, settled, script_args, cwd, environ or {})


def refused(cwd: Path, **more: Any) -> str:
    with pytest.raises(UsageError) as caught:
        job(cwd, **more)
    return str(caught.value)


def test_mapped_options_come_before_the_users_own_arguments(tmp_path: Path) -> None:
    plan = job(tmp_path, script_args=("--lr", "0.1"), seed="3").plan
    assert plan.script_args == ("--seed", "3", "--lr", "0.1")
    assert plan.seed == 3


def test_a_value_with_blanks_stays_one_argument(tmp_path: Path) -> None:
    data = tmp_path / "my data"
    data.mkdir()
    (data / "shard.bin").write_bytes(b"x")
    assert job(tmp_path, data="my data").plan.script_args == ("--data-root", str(data))


@pytest.mark.parametrize("option", [{"seed": "1"}, {"backend": "gloo"}])
def test_an_option_that_cannot_reach_the_script_is_refused(option: dict[str, str], tmp_path: Path) -> None:
    message = refused(tmp_path, scenario=BARE, **option)
    assert "cannot reach train" in message
    assert "[tool.harness.args]" in message


def test_data_without_a_mapping_is_refused(tmp_path: Path) -> None:
    assert "--data: data cannot reach train" in refused(tmp_path, scenario=BARE, data=".")


def test_the_cpu_reaches_any_script_through_its_environment(tmp_path: Path) -> None:
    assert job(tmp_path, scenario=BARE, device="cpu").plan.env == {"CUDA_VISIBLE_DEVICES": ""}
    assert job(tmp_path, scenario=BARE).plan.env == {}


def test_a_launcher_without_nodes(tmp_path: Path) -> None:
    assert "needs a launcher that has nodes" in refused(tmp_path, nodes="2")


def test_inline_is_one_process(tmp_path: Path) -> None:
    assert job(tmp_path, launcher="inline").plan.nproc == 1
    assert "runs one process" in refused(tmp_path, launcher="inline", nproc="2")


def test_a_typing_mistake_does_not_start_20000_processes(tmp_path: Path) -> None:
    assert "more than 1024" in refused(tmp_path, nproc="20000")


def test_more_ranks_than_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "count_gpus", lambda environ: 1)
    assert "with 2 processes a node, but 1 GPU; take -n 1" in refused(tmp_path, device="cuda")
    mapped = Scenario("train", "train.py", Header(args={"device": "--device {}"}))
    assert job(tmp_path, mapped, device="cuda", nproc="1").plan.nproc == 1
    monkeypatch.setattr(planning, "count_gpus", lambda environ: 0)
    assert "shows no GPU" in refused(tmp_path, device="cuda")
    monkeypatch.setattr(planning, "count_gpus", lambda environ: None)
    assert job(tmp_path, mapped, device="cuda").plan.device == "cuda"
    assert "device cannot reach train" in refused(tmp_path, device="cuda")


def test_nccl_on_the_cpu_is_refused(tmp_path: Path) -> None:
    assert "nccl needs GPUs" in refused(tmp_path, device="cpu", backend="nccl")


def test_gpus_are_counted_as_cuda_shows_them(tmp_path: Path) -> None:
    proc, dev = tmp_path / "gpus", tmp_path / "dev"
    dev.mkdir()
    assert planning.count_gpus({}, proc, dev) == 0
    (dev / "kfd").touch()
    assert planning.count_gpus({}, proc, dev) is None  # an AMD GPU: only torch can tell
    for i in range(4):
        (proc / f"0000:0{i}").mkdir(parents=True)
    assert planning.count_gpus({}, proc, dev) == 4
    for visible, count in {"": 0, "0": 1, "2,0": 2, "0,-1,1": 1, "1,9,0": 1, "GPU-8d3a,GPU-11ff": 2}.items():
        assert planning.count_gpus({"CUDA_VISIBLE_DEVICES": visible}, proc, dev) == count, visible


def test_the_reference_run_follows_the_header(tmp_path: Path) -> None:
    reference = job(tmp_path, script_args=("--lr", "1"), seed="3").reference
    assert reference is not None
    assert (reference.nproc, reference.script_args) == (1, ("--seed", "3", "--lr", "1", "--fp32"))
    assert job(tmp_path, no_reference="true").reference is None
    assert job(tmp_path, scenario=BARE).reference is None
    assert job(tmp_path, nproc="1").reference is None  # it would be the same run


def test_the_reference_has_the_threads_of_a_rank(tmp_path: Path) -> None:
    """torchrun gives one process all cores: on a busy host its threads wait for each other, and the reference took ten times as long."""
    given = job(tmp_path)
    assert given.reference is not None and given.reference.env["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in given.plan.env  # torchrun itself sets it there
    assert planning.reference_of(given.plan, {"OMP_NUM_THREADS": "4"}) == replace(given.reference, env=given.plan.env)  # the user's holds for all


def test_a_bad_data_folder_is_refused_also_behind_the_dashes(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(tmp_path, data="empty")
    for script_args in (("--data-root", "empty"), ("--data-root=empty",)):
        assert "is empty" in refused(tmp_path, script_args=script_args)
    assert job(tmp_path, script_args=("--data-root", "empty", "--download")).plan.script_args


def test_what_an_older_job_left_is_taken_out_and_named() -> None:
    environ = {
        "RANK": "3",
        "MASTER_ADDR": "node7",
        "PET_NNODES": "4",
        "TORCHELASTIC_RUN_ID": "x",
        "_HARNESS_RUN_DIR": "/old",
        "PATH": "/bin",
    }
    assert clean_environment(environ) == ["MASTER_ADDR", "PET_NNODES", "RANK", "TORCHELASTIC_RUN_ID"]
    assert environ == {"PATH": "/bin"}


KNOWN = {"SYN101": "forward-bypasses-ddp", "SYN102": "step-without-sync", "DAT101": "sampler-epoch-not-set"}


def test_checks_are_selected_by_code_name_and_family() -> None:
    assert expand_codes(["syn101"], KNOWN, "--select") == {"SYN101"}
    assert expand_codes(["SYN"], KNOWN, "--select") == {"SYN101", "SYN102"}
    assert expand_codes(["SYN1", "sampler-epoch-not-set"], KNOWN, "--select") == set(KNOWN)


@pytest.mark.parametrize(("typed", "meant"), [("SYN103", "SYN10"), ("sampler-epoch", "sampler-epoch-not-set"), ("SNY", "SYN")])
def test_an_unknown_code_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand_codes([typed], KNOWN, "--select")
    assert f"--select: unknown check '{typed}'" in str(caught.value)
    assert meant in str(caught.value).split("did you mean")[1]
