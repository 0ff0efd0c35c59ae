"""Device checks: tables of devices made by hand, failures as torch words them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from harness.checks.dev.autocast_elsewhere import AutocastElsewhere
from harness.checks.dev.backend_does_not_fit_device import BackendDoesNotFitDevice
from harness.checks.dev.data_parallel_in_job import DataParallelInJob
from harness.checks.dev.device_ids_mismatch import DeviceIdsMismatch
from harness.checks.dev.device_shared_by_ranks import DeviceSharedByRanks
from harness.checks.dev.device_side_assert import DeviceSideAssert
from harness.checks.dev.more_ranks_than_gpus import MoreRanksThanGpus
from harness.checks.dev.stray_context import StrayContext
from harness.checks.dev.torch_build_does_not_fit import TorchBuildDoesNotFit, _has_code
from harness.checks.dev.wrap_before_move import WrapBeforeMove
from harness.model import Severity
from harness.record import Event, Recording, Run
from tests.unit.checks.builder import event, findings, recording, row, run


def devices(current: int = 0, num: int = 2, contexts: Sequence[int] | None = None, stand_in: bool = False, **fields: object) -> Event:
    uuids = [f"GPU-{i}" for i in range(num)]
    told = {
        "contexts": list(contexts) if contexts is not None else [current],
        "current": current,
        "uuid": uuids[current],
        "uuids": uuids,
        "count": num,
    }
    return event("devices", when="step", stand_in=stand_in, **{**told, **fields})


def on(*current: int, num: int = 2, host: str = "a", **fields: object) -> Run:
    ranks = [
        recording([event("set_device", device=c, line=9), devices(c, num, **fields)], [row(0)], rank=r, host=host)
        for r, c in enumerate(current)
    ]
    return run(ranks)


def test_two_ranks_on_one_gpu() -> None:
    (found,) = findings(DeviceSharedByRanks, on(0, 0))
    assert found.ranks == (0, 1) and found.where and found.where.line == 9
    assert findings(DeviceSharedByRanks, on(0, 1)) == []


def test_equal_indices_on_two_hosts_are_healthy() -> None:
    ranks = [recording([devices(0, 1)], rank=r, host=h) for r, h in enumerate("ab")]
    assert findings(DeviceSharedByRanks, run(ranks)) == []


def test_one_visible_device_a_task_is_healthy() -> None:
    ranks = [recording([devices(0, 1, uuid=f"GPU-{r}", uuids=[f"GPU-{r}"])], rank=r) for r in range(2)]
    assert findings(DeviceSharedByRanks, run(ranks)) == [] and findings(MoreRanksThanGpus, run(ranks)) == []


def test_more_ranks_than_gpus() -> None:
    (found,) = findings(MoreRanksThanGpus, on(0, 1, 0))
    assert found.message == "3 ranks share 2 GPUs on one host"
    assert findings(DeviceSharedByRanks, on(0, 1, 0)) == []


def test_a_stand_in_is_said() -> None:
    assert any("stand-in" in note for note in findings(DeviceSharedByRanks, on(0, 0, stand_in=True))[0].notes)


def test_a_stray_context_is_shown_where_it_was_made() -> None:
    events = [event("set_device", device=0, line=7), event("set_device", device=1, line=8), devices(1, contexts=[0, 1])]
    (found,) = findings(StrayContext, run([recording([devices(0)], rank=0), recording(events, rank=1)]))
    assert found.ranks == (1,) and found.where and found.where.line == 7
    assert findings(StrayContext, on(0, 1)) == []


IDS = (
    "DistributedDataParallel device_ids and output_device arguments only work with single-device/multiple-device GPU modules or CPU modules"
    ", "
    "but got device_ids [0], output_device 0, and module parameters {device(type='cpu')}."
)


def test_device_ids_for_a_cpu_module() -> None:
    failure = event("failure", type="ValueError", message=IDS, line=49)
    (found,) = findings(DeviceIdsMismatch, run([recording([failure], rank=r) for r in range(2)], exits=(1, 1)))
    assert "module on the CPU" in found.message and found.where and found.where.line == 49 and found.ranks == (0, 1)


def wrap(device: str, ids: Sequence[str]) -> Event:
    return event("wrap", index=0, devices=[device], device_ids=list(ids), line=5, module="Net")


def test_device_ids_of_another_device() -> None:
    assert len(findings(DeviceIdsMismatch, run([recording([wrap("cuda:1", ["0"])])]))) == 1
    assert findings(DeviceIdsMismatch, run([recording([wrap("cuda:1", ["1"])])])) == []
    assert findings(DeviceIdsMismatch, run([recording([wrap("cpu", [])])])) == []


def parallel(rank: int, trained: bool) -> Recording:
    params = event("params", opt=0, roots=["DataParallel" if trained else "Net"])
    return recording([event("data_parallel", device_ids=[], line=7), params], [row(0)], rank=rank)


def test_data_parallel_that_several_ranks_train_in() -> None:
    (found,) = findings(DataParallelInJob, run([parallel(0, True), parallel(1, True)]))
    assert found.severity is Severity.ERROR
    assert [f.severity for f in findings(DataParallelInJob, run([parallel(0, True), recording(rank=1)]))] == [Severity.ADVICE]
    assert findings(DataParallelInJob, run([parallel(0, False), parallel(1, False)])) == []
    assert findings(DataParallelInJob, run([parallel(0, True)])) == []


def moved(**fields: object) -> Run:
    base = {
        "module": "Net",
        "held_by": "optimizer",
        "held": 4,
        "replaced": 0,
        "changed": 0,
        "stepped": False,
        "from_devices": ["meta"],
        "to_devices": ["cpu"],
    }
    return run([recording([event("moved_late", line=11, **{**base, **fields})], [row(0)])])


def test_moves_that_come_too_late() -> None:
    assert findings(WrapBeforeMove, moved(replaced=4))[0].where is not None
    assert len(findings(WrapBeforeMove, moved(changed=4, held_by="ddp"))) == 1
    assert len(findings(WrapBeforeMove, moved(changed=4, stepped=True))) == 1


def test_a_move_before_the_first_step_that_keeps_the_parameters_is_healthy() -> None:
    assert findings(WrapBeforeMove, moved(changed=4)) == []
    assert findings(WrapBeforeMove, run([recording([], [row(0)])])) == []


def test_a_cpu_build_on_a_gpu_machine() -> None:
    here = event("devices", when="step", driver=True, build="", uuid="")
    assert findings(TorchBuildDoesNotFit, run([recording([here])], device="cpu"))[0].severity is Severity.ADVICE
    assert findings(TorchBuildDoesNotFit, run([recording([here])], device="cuda"))[0].severity is Severity.WARNING
    assert findings(TorchBuildDoesNotFit, run([recording([event("devices", when="step", driver=False, build="", uuid="")])])) == []


def test_an_architecture_that_the_build_has_no_code_for() -> None:
    old = devices(driver=True, build="13.0", capability="6.1", arch_list=["sm_75", "sm_80"], cudnn=True)
    assert "compute capability 6.1" in findings(TorchBuildDoesNotFit, run([recording([old])]))[0].message


@pytest.mark.parametrize(
    ("capability", "arches", "fits"),
    [
        ("8.6", ["sm_80"], True),
        ("8.0", ["sm_86"], False),
        ("9.0", ["sm_80", "compute_80"], True),
        ("7.5", ["sm_80"], False),
        ("10.0", ["sm_100"], True),
    ],
)
def test_code_for_an_architecture(capability: str, arches: list[str], fits: bool) -> None:
    assert _has_code(capability, arches) is fits


def test_a_device_side_assert() -> None:
    failure = event("failure", type="RuntimeError", message="CUDA error: device-side assert triggered", line=30)
    log = "/pytorch/x.cu:12: kernel: block: [0,0,0], thread: [3,0,0] Assertion `mask` failed."
    (found,) = findings(DeviceSideAssert, run([recording([failure])], exits=(1,), logs={0: log}))
    assert "Assertion `mask` failed" in found.notes[0]


def test_nccl_without_a_gpu() -> None:
    events = [event("pg", done=False, asked={"backend": "nccl"}, line=4)]
    events.append(event("failure", type="ValueError", message="ProcessGroupNCCL is only supported with GPUs, no GPUs found!", line=4))
    (found,) = findings(BackendDoesNotFitDevice, run([recording(events)], exits=(1,)))
    assert "nccl" in found.message and found.where and found.where.line == 4


def test_gloo_for_a_model_on_gpus_is_slow() -> None:
    group = event("pg", done=True, backend="gloo", asked={}, world_size=2, line=4)
    ranks = [recording([group, wrap(f"cuda:{r}", [str(r)]), devices(r)], rank=r) for r in range(2)]
    assert [f.severity for f in findings(BackendDoesNotFitDevice, run(ranks))] == [Severity.WARNING]
    ranks = [recording([group, wrap("cpu", [])], rank=r) for r in range(2)]
    assert findings(BackendDoesNotFitDevice, run(ranks)) == []


ALL = (
    BackendDoesNotFitDevice, DataParallelInJob, DeviceIdsMismatch, DeviceSharedByRanks, DeviceSideAssert, MoreRanksThanGpus, StrayContext,
    TorchBuildDoesNotFit, WrapBeforeMove,
)  # fmt: skip


@pytest.mark.parametrize("check", ALL)
def test_a_healthy_cpu_run_and_torn_recordings(check: type) -> None:
    cpu = event("devices", when="step", driver=False, build="13.0", uuid="", uuids=[], contexts=[], cudnn=True)
    healthy = [recording([wrap("cpu", []), cpu], [row(0), row(1)], rank=r) for r in range(2)]
    assert findings(check, run(healthy)) == []
    torn = [event(k) for k in ("devices", "set_device", "wrap", "params", "data_parallel", "moved_late", "pg", "failure")]
    torn.append(event("devices", uuid="x", contexts="no", uuids=7, count=None))
    findings(check, run([]))
    findings(check, run([recording(torn, [row(0)[:30]]), recording(torn, rank=1)], exits=(1, 1)))


# ---- DEV110 ----
def test_autocast_for_another_device() -> None:
    told = event("autocast_elsewhere", line=40, asked=["cuda"], on=["cpu"])
    (found,) = findings(AutocastElsewhere, run([recording([told], [row(0)], rank=r) for r in range(2)]))
    assert found.code == "DEV110" and found.severity is Severity.WARNING and found.where is not None and found.where.line == 40 and found.ranks == (0, 1)
    recipe = event("autocast_elsewhere", line=40, asked=["cuda"], on=["cpu"], half=True)  # a GPU's script that was started on a CPU
    (found,) = findings(AutocastElsewhere, run([recording([recipe], [row(0)])]))
    assert found.severity is Severity.ADVICE
    assert findings(AutocastElsewhere, run([recording([], [row(0)])])) == []
