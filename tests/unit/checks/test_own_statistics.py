"""SYN116 where the script averages weights by hand: whose running statistics are measured with and saved; and what the sensor tells of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from builder import event, findings, recording, row, run

from harness.checks.syn.buffers import BufferNotReduced
from harness.model import Severity
from harness.probe.sensors import statistics
from harness.probe.state import S
from harness.record import Event, Run

NUMELS = [144, 16, 16, 4608]


def sites(
    *, means: tuple[float, float] = (0.3, 0.9), weights: tuple[int, int] = (7, 7), inputs: tuple[int, int] = (1, 2), savers: tuple[int, ...] = (0,),
    saved: int | None = None, reduced: bool = True, extra: tuple[Event, ...] = (), numels: list[int] = NUMELS,
) -> Run:  # fmt: skip
    """Two sites that average their weights at step 5, and measure and save at step 10."""

    def rank(r: int) -> Any:
        stats = 40 + (0 if means[0] == means[1] else r)
        told = [event("params", opt=0, names=["a", "b", "c", "d"], numels=NUMELS), *extra]
        told += [event("coll", s=5, line=50, op="all_reduce", numel=n) for n in numels]
        measured = event("evaluated", s=10, line=63, module="Net", params=weights[r], inputs=inputs[r], stats=stats, layers=[["0.1", [means[r]] * 4, [0.25] * 4]])
        measured.data["first_t"] = measured.t_ns  # type: ignore[index]
        told.append(measured)
        if reduced:
            told.append(event("coll", s=10, line=64, op="all_reduce", numel=2))
        if r in savers:
            told.append(event("statistics_saved", s=10, line=95, path="/m/global.pt", stats=stats if saved is None else saved))
        return recording(told, [row(s) for s in range(10)], rank=r)

    return run([rank(0), rank(1)])


def test_statistics_that_nobody_averages() -> None:
    (found,) = findings(BufferNotReduced, sites())
    assert (found.severity, found.where and found.where.line) == (Severity.WARNING, 50)
    assert "running statistics" in found.message and "rank 0 saves its own" in found.message
    assert list(found.notes) == ["the running means of 0.1 are 1.2 deviations apart", "rank 0 saves at line 95"]
    assert len(findings(BufferNotReduced, sites(numels=[sum(NUMELS)]))) == 1  # one flat vector


@pytest.mark.parametrize(
    "healthy",
    [
        sites(means=(0.5, 0.5)),  # averaged with the weights
        sites(means=(0.50, 0.55)),  # shares of one shuffled set: as good as any rank's
        sites(weights=(7, 8)),  # FedBN: scales of their own too
        sites(savers=(0, 1)),  # SiloBN: each site keeps its own
        sites(savers=()),
        sites(saved=99),  # averaged for the file
        sites(inputs=(1, 1)),  # all measure the same samples
        sites(reduced=False),  # each tells its own number
        sites(extra=(event("wrap", line=5, index=0, names=["a"], numels=[1]),)),  # DDP: told otherwise
        sites(numels=[3]),  # nobody averages the weights
    ],
)
def test_statistics_kept_on_purpose_and_alike(healthy: Run) -> None:
    assert findings(BufferNotReduced, healthy) == []


torch = pytest.importorskip("torch")


def test_the_sensor_tells_saved_statistics_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(S, "recorder", SimpleNamespace(event=lambda kind, at, **fields: told.append(fields), disabled=False, errors=0))
    monkeypatch.setattr(statistics, "_shared_work", lambda: True)
    net = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.BatchNorm1d(40), torch.nn.BatchNorm1d(40, track_running_stats=False))
    net(torch.randn(8, 3))
    stats, params, layers = statistics.of(net)
    assert stats and params and [name for name, *_ in layers] == ["1"] and len(layers[0][1]) <= 16
    statistics._at_save({"model": net.state_dict(), "epoch": 3}, ("train.py", 1, "main"), "/m/a.pt")
    net(torch.randn(8, 3))
    statistics._at_save(net.state_dict(), ("train.py", 1, "main"), "/m/a.pt")
    assert told[0]["stats"] == stats and told[1]["stats"] == statistics.of(net)[0] != stats
    assert statistics.of(torch.nn.Linear(3, 3)) == (0, 0, [])


def test_the_sensor_is_silent_in_one_process() -> None:
    assert statistics.of(torch.nn.BatchNorm1d(3)) == (0, 0, [])
