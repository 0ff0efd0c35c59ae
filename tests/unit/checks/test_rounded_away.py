"""OPT139 on what the sensor tells, and the sensor on small models."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from builder import event, findings, recording, row, run, site

from harness.checks.opt.rounded_away import UpdatesRoundedAway
from harness.model import Severity
from harness.probe.sensors import roundedaway
from harness.probe.state import S
from harness.record import Run


def told(lost: int, *, still: int = 50, looks: int = 8, lr: float = 1e-4, warm: int = 0) -> Run:
    seen = [[0, 0.01 * lr, 100, 100]] * warm + [[0, lr, lost, 100]] * looks + [[1, 0.0, 100, 100]] * looks  # the second group stands still on purpose
    of = event(
        "rounded_away", line=71, opt=0, dtype="bfloat16", cast=site(50), looks=seen, still=[still, 100], stuck=["norm.weight"] if still else [],
        num_stuck=int(still > 0), num_params=9,
    )  # fmt: skip
    return run([recording([event("params", opt=0, devices=["cpu"]), of], [row(0)])])


def test_most_updates_are_rounded_away() -> None:
    (found,) = findings(UpdatesRoundedAway, told(62))
    assert (found.code, found.severity, found.where and found.where.line) == ("OPT139", Severity.WARNING, 50)
    assert "62% of their elements" in found.message and "50% of them" in found.notes[0] and "norm.weight" in found.notes[1]
    assert [f.severity for f in findings(UpdatesRoundedAway, told(36))] == [Severity.ADVICE]


def test_half_precision_that_trains() -> None:
    assert findings(UpdatesRoundedAway, told(10)) == []
    assert findings(UpdatesRoundedAway, told(62, still=2)) == []  # Kahan summation: what is left of a step comes later
    assert findings(UpdatesRoundedAway, told(62, looks=3)) == []
    assert findings(UpdatesRoundedAway, told(10, warm=8)) == []  # a warm-up: small steps at first
    assert findings(UpdatesRoundedAway, told(100, lr=0.0)) == []
    assert findings(UpdatesRoundedAway, run([recording([event("params", opt=0, devices=["cpu"])], [row(0)])])) == []


torch = pytest.importorskip("torch")


@pytest.fixture
def sensed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(event=lambda kind, at, **fields: found.append(fields), disabled=False, errors=0)
    monkeypatch.setattr(roundedaway, "_half", {})
    monkeypatch.setattr(S, "steps", 0)
    monkeypatch.setattr(S, "recorder", recorder)
    yield found


def trained(dtype: Any, lr: float, *, own: bool = True, clamp: float = 0.0) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)).to(dtype)
    kind = torch.optim.Adam if own else type("Kahan", (torch.optim.Adam,), {"__module__": "train"})
    optimizer = kind(net.parameters(), lr=lr)
    names, params = zip(*net.named_parameters(), strict=True)
    witness = SimpleNamespace(opt=0, names=list(names), roots=[])
    for step in range(26):
        S.steps = step
        optimizer.zero_grad()
        net(torch.randn(16, 8, dtype=dtype)).square().mean().backward()
        roundedaway._look(optimizer, witness, list(params))
        optimizer.step()
        for p in params if clamp else ():
            p.data.clamp_(-clamp, clamp)
    roundedaway._tell()


def test_the_sensor_counts_what_a_step_leaves(sensed: list[dict[str, Any]]) -> None:
    trained(torch.bfloat16, 1e-4)
    (one,) = sensed
    assert one["dtype"] == "bfloat16" and len(one["looks"]) == 7 and "1.weight" in one["stuck"]
    assert sum(lost for _, _, lost, _ in one["looks"]) > 0.5 * sum(num for _, _, _, num in one["looks"])


def test_large_steps_and_whole_precision(sensed: list[dict[str, Any]]) -> None:
    trained(torch.bfloat16, 0.1)
    (one,) = sensed
    assert sum(lost for _, _, lost, _ in one["looks"]) < 0.2 * sum(num for _, _, _, num in one["looks"]) and one["num_stuck"] == 0
    sensed.clear()
    roundedaway._half.clear()
    trained(torch.float32, 1e-4)
    assert sensed == []


def test_optimizers_that_keep_what_is_left_and_weights_at_their_bounds(sensed: list[dict[str, Any]]) -> None:
    trained(torch.bfloat16, 1e-4, own=False)
    assert sensed == []
    trained(torch.bfloat16, 1e-2, clamp=0.01)
    assert not any(one["num_stuck"] > 2 for one in sensed)


def test_a_rate_that_the_optimizer_finds_itself() -> None:
    assert roundedaway._rate({"lr": None}) == 1.0 and roundedaway._rate({}) == 1.0 and roundedaway._rate({"lr": torch.tensor(0.5)}) == 0.5
