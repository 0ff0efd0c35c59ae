"""Every line of the doctor, on hosts that are stand-ins: folders, environments and torch's answers made by hand."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.doctor import (
    backends,
    clock,
    compute_capability,
    cuda_environment,
    cudnn,
    devices,
    inherited,
    interface,
    leftovers,
    limits,
    master_address,
    run_folder,
    shared_memory,
    slurm,
    threads,
    torch_build,
    torch_child,
)
from harness.doctor.line import ERROR, LEVELS, OK, WARNING, Host, Line, every, examine
from harness.probe.protocol import ENV_RUN_ID

H100 = {"index": 0, "name": "NVIDIA H100", "capability": [9, 0], "total_bytes": 80 << 30}
GPU_TORCH: dict[str, Any] = {
    "version": "2.14.1", "cuda": "13.0", "distributed": True, "gloo": True, "nccl": True, "nccl_version": [2, 29, 1], "cudnn": 91900,
    "arch_list": ["sm_80", "sm_90", "compute_90"], "cuda_available": True, "devices": [H100, {**H100, "index": 1}],
    "nvml": {"driver": "580.65", "driver_cuda": [13, 0], "physical": [{"total_bytes": 80 << 30, "used_bytes": 1 << 30}] * 2},
}  # fmt: skip


def host(tmp_path: Path, torch: dict[str, Any] | None = None, gpu: bool = False, **more: Any) -> Host:
    for part in ("dev", "proc", "shm"):
        (tmp_path / part).mkdir(exist_ok=True)
    if gpu:
        (tmp_path / "dev" / "nvidia0").touch()
    settled: dict[str, Any] = {"environ": {}, "cwd": tmp_path, "num_cores": 8, **more}
    return Host(proc=tmp_path / "proc", dev=tmp_path / "dev", shm=tmp_path / "shm", torch=torch or {}, **settled)


def levels(lines: Any) -> list[str]:
    return [line.level for line in lines]


def only(lines: Any) -> Line:
    (line,) = lines
    assert line.level == OK or line.fix, "what is wrong has a fix"
    return line


def test_every_file_is_a_line_and_each_says_why(tmp_path: Path) -> None:
    assert len(every()) >= 15
    assert 4 <= len(every(quick_only=True)) < len(every())
    for line in examine(host(tmp_path, GPU_TORCH, gpu=True)):
        assert line.level in LEVELS and line.says and line.why and (line.level == OK or line.fix), line


def test_a_line_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "look", lambda host: 1 / 0)
    found = {line.name: line for line in examine(host(tmp_path))}
    assert found["threads"].level == WARNING and "ZeroDivisionError" in found["threads"].says and "shared memory" in found


def test_a_cpu_build_beside_a_gpu_is_an_error(tmp_path: Path) -> None:
    line = only(torch_build.look(host(tmp_path, {**GPU_TORCH, "cuda": None, "devices": []}, gpu=True)))
    assert line.level == ERROR and "(cpu), but this machine has a GPU" in line.says


def test_a_cpu_build_without_a_gpu_is_fine(tmp_path: Path) -> None:
    assert only(torch_build.look(host(tmp_path, {"version": "2.14.1", "cuda": None}))).says == "torch 2.14.1 (cpu), no GPU driver here"


@pytest.mark.parametrize(("build", "driver", "level"), [("13.0", [12, 8], ERROR), ("12.8", [12, 2], OK), ("12.8", [13, 0], OK), ("13.0", [13, 0], OK)])
def test_a_build_newer_than_the_driver(tmp_path: Path, build: str, driver: list[int], level: str) -> None:
    torch = {**GPU_TORCH, "cuda": build, "nvml": {"driver": "550", "driver_cuda": driver}}
    assert only(torch_build.look(host(tmp_path, torch, gpu=True))).level == level


def test_torch_that_cannot_be_imported_or_sees_no_gpu(tmp_path: Path) -> None:
    assert only(torch_build.look(host(tmp_path, {"import_error": "ModuleNotFoundError: torch"}))).level == ERROR
    assert only(torch_build.look(host(tmp_path, {**GPU_TORCH, "cuda_available": False}, gpu=True))).level == WARNING
    assert list(torch_build.look(host(tmp_path))) == []


@pytest.mark.parametrize(
    ("capability", "listed", "fits"),
    [([9, 0], ["sm_90"], True), ([8, 6], ["sm_80"], True), ([8, 0], ["sm_86"], False), ([12, 0], ["sm_90"], False),
     ([12, 0], ["sm_90", "compute_90"], True), ([7, 0], ["sm_75", "sm_80"], False), ([9, 0], ["sm_90a"], True), ([10, 3], ["sm_100"], True)],
)  # fmt: skip
def test_compute_capability(tmp_path: Path, capability: list[int], listed: list[str], fits: bool) -> None:
    torch = {**GPU_TORCH, "arch_list": listed, "devices": [{**H100, "capability": capability}]}
    assert (only(compute_capability.look(host(tmp_path, torch))).level == OK) == fits


def test_cudnn_and_backends(tmp_path: Path) -> None:
    assert only(cudnn.look(host(tmp_path, GPU_TORCH))).says == "cuDNN 91900"
    assert only(cudnn.look(host(tmp_path, {**GPU_TORCH, "cudnn": None}))).level == WARNING
    assert [line.says for line in backends.look(host(tmp_path, GPU_TORCH))] == ["gloo", "nccl 2.29.1"]
    assert levels(backends.look(host(tmp_path, {**GPU_TORCH, "nccl": False}))) == [OK, WARNING]
    assert levels(backends.look(host(tmp_path, {"version": "2", "distributed": False}))) == [ERROR]


def test_devices_that_are_too_few_or_filled(tmp_path: Path) -> None:
    assert only(devices.look(host(tmp_path, GPU_TORCH))).says == "2 GPUs visible for 2 ranks"
    assert "for 4 ranks" in only(devices.look(host(tmp_path, GPU_TORCH, nproc=4))).says
    filled = {"physical": [{"total_bytes": 80 << 30, "used_bytes": 40 << 30}]}
    assert levels(devices.look(host(tmp_path, {**GPU_TORCH, "nvml": filled}))) == [OK, WARNING]


def test_interfaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "proc" / "net").mkdir(parents=True)
    (tmp_path / "proc" / "net" / "dev").write_text("Inter|\n face |\n    lo: 1\n  eth0: 1\n")
    assert levels(interface.look(host(tmp_path, environ={"GLOO_SOCKET_IFNAME": "eth0"})))[1:] == [OK]
    wrong = list(interface.look(host(tmp_path, environ={"GLOO_SOCKET_IFNAME": "ib0"})))[1]
    assert wrong.level == ERROR and "eth0, lo" in wrong.says

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert levels(interface.look(host(tmp_path))) == [WARNING]
    assert levels(interface.look(host(tmp_path, nodes=2))) == [ERROR]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    assert levels(interface.look(host(tmp_path, nodes=2))) == [ERROR]


def test_master_address_and_port(tmp_path: Path) -> None:
    assert only(master_address.look(host(tmp_path))).level == OK
    assert levels(master_address.look(host(tmp_path, environ={"MASTER_ADDR": "no.such.host.invalid"}))) == [ERROR]
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = list(master_address.look(host(tmp_path, environ={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})))
    assert levels(found) == [OK, WARNING] and found[1].says == f"MASTER_PORT={port} is taken"
    assert levels(master_address.look(host(tmp_path, environ={"MASTER_PORT": "http"}))) == [ERROR]


def test_what_another_job_left(tmp_path: Path) -> None:
    line = only(inherited.look(host(tmp_path, environ={"RANK": "3", "PET_NPROC_PER_NODE": "8", "HOME": "/"})))
    assert line.level == WARNING and "PET_NPROC_PER_NODE=8, RANK=3" in line.says


@pytest.mark.parametrize(("free", "level"), [(4 << 30, OK), (64 << 20, WARNING), (1 << 20, ERROR)])
def test_shared_memory(free: int, level: str) -> None:
    assert shared_memory.judge("/dev/shm", 8 << 30, free).level == level


@pytest.mark.parametrize(("limit", "level"), [(resource.RLIM_INFINITY, OK), (65536, OK), (256, WARNING), (64, ERROR)])
def test_limits(limit: int, level: str) -> None:
    assert limits.judge("open files", "ulimit -n", limit, 320, "ulimit -n 65536").level == level


@pytest.mark.parametrize(
    ("omp", "nproc", "cores", "level"), [("", 2, 2, OK), ("", 1, 2, OK), ("4", 2, 8, OK), ("8", 2, 8, WARNING), ("", 16, 8, WARNING), ("x", 2, 8, OK)]
)
def test_threads(tmp_path: Path, omp: str, nproc: int, cores: int, level: str) -> None:
    assert only(threads.look(host(tmp_path, environ={"OMP_NUM_THREADS": omp}, nproc=nproc, num_cores=cores))).level == level


def test_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(run_folder.look(host(tmp_path, folder=tmp_path / "not" / "yet"))).level == OK
    mounts = tmp_path / "proc" / "self" / "mountinfo"
    mounts.parent.mkdir()
    mounts.write_text(f"1 0 8:1 / / rw - ext4 disk rw\n2 1 0:2 / {tmp_path.resolve()} rw - nfs4 server:/x rw\n")
    assert levels(run_folder.look(host(tmp_path, nodes=2))) == [OK, OK]
    mounts.write_text("1 0 8:1 / / rw - ext4 disk rw\n")
    assert levels(run_folder.look(host(tmp_path, nodes=2))) == [OK, ERROR]
    assert levels(run_folder.look(host(tmp_path, nodes=2, nodes_are_here=True))) == [OK, OK]

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    assert "read-only file system" in only(run_folder.look(host(tmp_path))).says


def test_the_clock() -> None:
    assert clock.judge(100.0, 99.998, 100.01).level == OK
    assert clock.judge(100.0, 103.0, 100.01).level == WARNING
    assert clock.judge(100.0, 96.0, 100.01).level == WARNING


def test_left_over_ranks_and_segments_are_named_and_not_touched(tmp_path: Path) -> None:
    """An orphan that bears the mark, hanging below init, as /proc would show it."""
    here = host(tmp_path)

    def process(pid: int, ppid: int, mark: str = "") -> None:
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (python) S {ppid} {pid} {pid} 0")
        (folder / "environ").write_bytes(f"HOME=/\0{mark}".encode())
        (folder / "cmdline").write_bytes(b"python\0train.py\0")

    process(50, 1, f"{ENV_RUN_ID}=abc\0")  # a rank whose supervisor is gone
    process(60, 1)  # a supervisor
    process(61, 60, f"{ENV_RUN_ID}=def\0")  # a rank of a run that goes on
    process(62, 61, f"{ENV_RUN_ID}=def\0")
    for name in ("torch_50_1_0", "torch_99_1_0", "psm_unknown"):
        (tmp_path / "shm" / name).touch()
    found = list(leftovers.look(here))
    assert [line.says for line in found] == [
        "1 processes of an earlier run: 50 (python train.py)", "1 segments of processes that are gone: torch_99_1_0",
    ]  # fmt: skip
    assert (tmp_path / "shm" / "torch_99_1_0").exists()


def test_slurm(tmp_path: Path) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    assert only(slurm.look(host(tmp_path, environ={"PATH": str(bin_dir)}))).says.startswith("no Slurm here")
    for tool in slurm.TOOLS:
        (bin_dir / tool).write_text("#!/bin/sh\necho 'debug* 2 idle'\necho 'debug* 1 down*'\n")
        (bin_dir / tool).chmod(0o755)
    here = host(tmp_path, environ={"PATH": f"{bin_dir}:{os.environ['PATH']}"})
    assert only(slurm.look(here)).says == "2 usable node entries in 2 rows of sinfo"
    (bin_dir / "sinfo").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    assert "Unable to contact" in only(slurm.look(here)).says
    (bin_dir / "srun").unlink()
    assert "srun not found" in only(slurm.look(host(tmp_path, environ={"PATH": str(bin_dir)}))).says


@pytest.mark.parametrize(("value", "level"), [("0,1", OK), ("", OK), ("0,0", WARNING), ("0,-1,1", WARNING)])
def test_visible_devices(tmp_path: Path, value: str, level: str) -> None:
    assert only(cuda_environment.look(host(tmp_path, environ={"CUDA_VISIBLE_DEVICES": value}))).level == level


def test_what_torch_prints_at_import_does_not_hide_its_answer() -> None:
    assert torch_child.answer('warning: x\n{"version": "2"}\n', "", 0) == {"version": "2"}
    assert torch_child.answer("", "Traceback\nImportError: libcudart", 1) == {"import_error": "ImportError: libcudart"}
    assert torch_child.answer("[1, 2]\n", "", 0)["import_error"]


def test_the_child_asks_a_torch_of_its_own(tmp_path: Path) -> None:
    """A stand-in package with two GPUs: what `harness doctor` says of it, through the real child process."""
    package = tmp_path / "lib" / "torch"
    (package / "distributed").mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "distributed" / "__init__.py").write_text("is_available = is_gloo_available = is_nccl_available = lambda: True\n")
    said = torch_child.ask(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path / "lib")})
    assert (said["version"], said["cuda"], said["nccl_version"], len(said["devices"])) == ("9.9", "13.0", [2, 29, 1], 2)
    assert torch_child.ask(str(tmp_path / "no-python"), {})["import_error"].startswith("FileNotFoundError")


STAND_IN = """
from types import SimpleNamespace as N
print("a warning at import")
__version__ = "9.9"
version = N(cuda="13.0", hip=None)
properties = N(name="stand-in", major=9, minor=0, total_memory=1 << 36)
cuda = N(nccl=N(version=lambda: (2, 29, 1)), get_arch_list=lambda: ["sm_90"], is_available=lambda: True, device_count=lambda: 2,
         get_device_properties=lambda i: properties)
backends = N(cudnn=N(is_available=lambda: True, version=lambda: 91900))
"""


def test_the_verb(tmp_path: Path) -> None:
    """Exit code, both outputs, and no torch in the controller."""
    harness = [sys.executable, "-X", "importtime", "-m", "harness", "doctor", "--no-torch", "--format", "json"]
    env = {**{k: v for k, v in os.environ.items() if not k.startswith(("MASTER", "SLURM"))}, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(harness, cwd=tmp_path, env={**env, "MASTER_ADDR": "no.such.host.invalid"}, capture_output=True, text=True, timeout=60)
    document = json.loads(done.stdout)
    assert done.returncode == 1 and document["counts"]["error"] >= 1
    assert {"name", "level", "says", "why", "fix"} == set(document["lines"][0])
    assert not any(line.rpartition("|")[2].strip() in ("torch", "numpy") for line in done.stderr.splitlines())
