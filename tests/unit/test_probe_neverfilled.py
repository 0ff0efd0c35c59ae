"""What of to_empty()'s memory is told: buffers and parameters that the first forward reads and nobody has written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.probe.sensors import neverfilled

torch = pytest.importorskip("torch")
nn = torch.nn


class Gained(nn.Module):  # type: ignore[name-defined,misc]
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("gain", torch.linspace(1, 2, 4), persistent=False)
        self.register_buffer("cache", torch.zeros(8, 4), persistent=False)
        self.register_buffer("idle", torch.ones(4), persistent=False)
        self.register_buffer("where", torch.zeros(1), persistent=False)

    def forward(self, x: Any) -> Any:
        self.cache[: len(x)] = x.detach()
        return self.lin(x).to(self.where.device) * self.gain + self.cache[: len(x)]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    recorder = type("Recorder", (), {"disabled": False, "errors": 0, "event": lambda self, kind, site=None, **told: events.append({"kind": kind, **told})})()
    monkeypatch.setattr(neverfilled.S, "recorder", recorder)
    monkeypatch.setattr(neverfilled.S, "steps", 0)
    monkeypatch.setattr(neverfilled.S, "compiling", False)
    monkeypatch.setattr(neverfilled.sites, "here", lambda depth: ("train.py", 9, "main"))
    monkeypatch.setattr(neverfilled, "_forward", [None, 0])
    original = nn.Module.__getattr__
    yield events
    neverfilled.stop()
    neverfilled._empty.clear()
    neverfilled._modules.clear()
    assert nn.Module.__getattr__ is original and not torch.nn.modules.module._global_forward_hooks


def emptied(fill: Callable[[Any], Any]) -> Any:
    """A model with memory that holds something, as the allocator would hand it out."""
    with torch.device("meta"):
        model = Gained()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.linspace(3, 4, tensor.numel()).view_as(tensor))
    neverfilled._after_to_empty(None, model)
    fill(model)
    model(torch.ones(2, 4))
    return model


def all_but(*names: str) -> Callable[[Any], None]:
    def fill(model: Any) -> None:
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name not in names:
                    tensor.fill_(1.0)

    return fill


def test_a_buffer_and_a_parameter_that_nobody_filled(told: list[dict[str, Any]]) -> None:
    emptied(all_but("gain", "lin.bias", "idle", "where", "cache"))  # idle is not read, where only asked for its device, cache filled by the forward
    (event,) = told
    assert sorted(row[0] for row in event["names"]) == ["gain", "lin.bias"] and event["kind"] == "never_filled"


def by_data(model: Any) -> None:
    all_but("gain")(model)
    model.gain.data.copy_(torch.linspace(1, 2, 4))


def assigned(model: Any) -> None:
    all_but("gain")(model)
    model.gain = torch.linspace(1, 2, 4)


def loaded(model: Any) -> None:
    all_but("lin.weight", "lin.bias")(model)
    model.load_state_dict(nn.Module.state_dict(Gained()), assign=True)


def same_content(model: Any) -> None:
    """The memory happened to hold what is written: counted as a write."""
    all_but("gain")(model)
    model.gain.copy_(model.gain.clone())


@pytest.mark.parametrize("fill", [all_but(), all_but("idle", "where", "cache"), by_data, assigned, loaded, same_content])
def test_what_was_filled(told: list[dict[str, Any]], fill: Callable[[Any], None]) -> None:
    emptied(fill)
    assert told == []


def test_complex_frequencies(told: list[dict[str, Any]]) -> None:
    class Turned(nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("turns", torch.ones(4, dtype=torch.complex64), persistent=False)

        def forward(self, x: Any) -> Any:
            return x * self.turns

    model = nn.Sequential(Turned())
    model[0].turns.fill_(2j)
    neverfilled._after_to_empty(None, model)
    model(torch.ones(2, 4))
    assert [row[0] for event in told for row in event["names"]] == ["0.turns"]


def test_a_forward_that_fails_is_looked_at_as_well(told: list[dict[str, Any]]) -> None:
    def fill(model: Any) -> None:
        all_but("gain")(model)
        model.register_forward_hook(lambda *args: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        emptied(fill)
    assert [row[0] for event in told for row in event["names"]] == ["gain"]


def test_replicas_that_ddp_filled_with_it(told: list[dict[str, Any]]) -> None:
    """A write of what was there: rank 0's part in DDP's first broadcast."""

    def fill(model: Any) -> None:
        all_but("gain")(model)
        neverfilled._syncing(lambda: model.gain.copy_(model.gain.clone()))()

    emptied(fill)
    assert [row[0] for event in told for row in event["names"]] == ["gain"]


@pytest.mark.parametrize(("line", "writes"), [
    ("self.mask.data.zero_()", True), ("p.data[0] = 1", True), ("p.data = x", True),
    ("loader = torch.utils.data.DataLoader(data)", False), ("norm = p.data.norm()", False),
])  # fmt: skip
def test_writes_that_leave_no_version(line: str, writes: bool) -> None:
    assert bool(neverfilled.DATA_WRITE.search(line)) is writes
