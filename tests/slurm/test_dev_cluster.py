"""What scripts/slurm-dev-cluster says where it cannot start a cluster. None of these starts one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import DEV_CLUSTER, no_slurm

NOBODY = 65534
WITHOUT_NAMESPACES = ("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin")


def refusal(*words: object, user: int | None = None, **env: str) -> str:
    tried = subprocess.run(words, capture_output=True, text=True, timeout=60, user=user, env={**os.environ, **env})
    assert tried.returncode == 2 and "Traceback" not in tried.stderr, tried.stderr
    return tried.stderr


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        no_slurm(RuntimeError("not root"))


def test_only_root_may() -> None:
    place = Path(tempfile.mkdtemp(dir="/tmp"))  # where nobody can read it too
    try:
        place.chmod(0o755)
        shutil.copytree(DEV_CLUSTER.parent / "slurm_dev", place / "slurm_dev")
        said = refusal("python3", "-I", shutil.copy(DEV_CLUSTER, place), "start", "--dir", place / "x", user=NOBODY if os.geteuid() == 0 else None)
        assert "only root may make namespaces of this kind" in said
    finally:
        shutil.rmtree(place)


def test_packages_that_are_missing_are_named(root: None, tmp_path: Path) -> None:
    said = refusal(sys.executable, DEV_CLUSTER, "start", "--dir", tmp_path / "x", PATH=str(tmp_path))
    assert "slurmctld, slurmd, srun" in said and "slurm-dev-cluster start --install, which runs apt-get install" in said
    assert "apt-get only, and it is not here" in refusal(sys.executable, DEV_CLUSTER, "start", "--install", "--dir", tmp_path / "x", PATH=str(tmp_path))


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv to take a capability away")
def test_where_namespaces_are_not_allowed_it_says_what_cannot_be_had(root: None, tmp_path: Path) -> None:
    if shutil.which("slurmctld") is None:
        no_slurm(RuntimeError("slurmctld not found"))
    said = refusal(*WITHOUT_NAMESPACES, sys.executable, DEV_CLUSTER, "start", "--dir", tmp_path / "x")
    assert "namespaces are not allowed here" in said and "neither nodes nor a clean stop can be had" in said
    assert not (tmp_path / "x").exists()


def test_a_folder_of_somebody_elses_is_left_alone(root: None, tmp_path: Path) -> None:
    if shutil.which("slurmctld") is None:
        no_slurm(RuntimeError("slurmctld not found"))
    (tmp_path / "mine").write_text("x")
    try:
        short = Path("/tmp") / f"hs-link-{os.getpid()}"
        short.symlink_to(tmp_path)
        assert "holds files that are not a cluster's" in refusal(sys.executable, DEV_CLUSTER, "start", "--dir", short)
    finally:
        short.unlink()
    assert "too long" in refusal(sys.executable, DEV_CLUSTER, "start", "--dir", tmp_path / ("x" * 60))
    assert (tmp_path / "mine").read_text() == "x"


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    for verb in (["stop"], ["status"], ["env"], ["kill-node", "n1"]):
        assert "no cluster in" in refusal(sys.executable, DEV_CLUSTER, *verb, "--dir", tmp_path)
