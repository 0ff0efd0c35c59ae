"""Parameters that are private although share_memory() was called on their model: what the sensor finds in one process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.probe import sites
from harness.probe.sensors import edits, halfshared
from harness.probe.state import S

AT: sites.Site = ("train.py", 7, "main")


@pytest.fixture
def sensed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    recorder = SimpleNamespace(
        event=lambda kind, site=None, **fields: found.append({"kind": kind} | fields), disabled=False, errors=0, role="child"
    )  # fmt: skip
    for name, value in (("_roots", {}), ("_parts", {}), ("_used", set()), ("_owners", set()), ("_hook", [])):
        monkeypatch.setattr(halfshared, name, value)
    monkeypatch.setattr(edits, "watch", lambda: None)
    monkeypatch.setattr(edits, "of_attributes", {})
    monkeypatch.setattr(S, "steps", 1)
    monkeypatch.setattr(S, "group", None)
    monkeypatch.setattr(S, "recorder", recorder)
    yield found
    for hook in halfshared._hook:
        hook.remove()


def shared_net() -> Any:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    net.share_memory()
    halfshared._shared(net, AT)
    return net


def test_a_layer_that_is_put_in_after_sharing(sensed: list[dict[str, Any]]) -> None:
    net = shared_net()
    net[1] = torch.nn.Linear(4, 2)
    edits.of_attributes[(id(net), "1")] = ("train.py", 9, "main")
    halfshared._starting(AT)
    halfshared._starting(AT)  # the second worker
    (one,) = sensed
    assert one["names"] == ["1.weight", "1.bias"] and one["num_shared"] == 2 and [p["line"] for p in one["put"]] == [9, 9]
    halfshared._joined()
    net(torch.ones(1, 4))
    assert sensed[-1]["how"] == "forward" and [name for _, name in sensed[-1]["parts"]] == one["names"]
    assert not halfshared._hook  # nothing is left to look for


def test_a_child_moves_what_is_private(sensed: list[dict[str, Any]]) -> None:
    net = shared_net()
    net[1].weight.data = torch.zeros(2, 4)
    halfshared._starting(AT)
    assert sensed[-1]["names"] == ["1.weight"] and sensed[-1]["put"] == [None]
    halfshared._at_step(None, None, list(net.parameters()))
    assert [e["kind"] for e in sensed] == ["half_shared"]  # no step has moved it
    with torch.no_grad():
        net[1].weight += 1
    halfshared._at_step(None, None, list(net.parameters()))
    assert sensed[-1]["kind"] == "half_trained" and sensed[-1]["parts"] == [[id(net), "1.weight"]]
    halfshared._joined()
    halfshared._saving({"model": net.state_dict()}, AT, "m.pt")
    assert sensed[-1]["kind"] == "half_trained"  # what is saved is no longer what it was at the start


def test_what_is_saved_untouched(sensed: list[dict[str, Any]]) -> None:
    net = shared_net()
    net[1].weight.data = torch.ones(2, 4)
    halfshared._starting(AT)
    halfshared._joined()
    halfshared._saving({k: v for k, v in net.state_dict().items() if k != "1.weight"}, AT, "m.pt")
    assert len(sensed) == 1
    halfshared._saving({"model": net.state_dict()}, AT, "m.pt")
    assert sensed[-1]["how"] == "save"


def test_frozen_whole_and_shared_again(sensed: list[dict[str, Any]]) -> None:
    net = shared_net()
    net[1] = torch.nn.Linear(4, 2).requires_grad_(False)
    halfshared._starting(AT)
    again = shared_net()
    again[1] = torch.nn.Linear(4, 2)
    again.share_memory()
    halfshared._starting(AT)
    whole = torch.nn.Linear(4, 2)
    halfshared._shared(whole, AT)
    halfshared._starting(AT)  # all of it is private: another finding
    assert sensed == []
