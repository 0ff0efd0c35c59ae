"""What the script calls tensors that no module owns."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from harness.probe import barenames, sites  # noqa: E402


@pytest.fixture(autouse=True)
def mine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "user_frame", lambda frame: frame)
    monkeypatch.setattr(sites, "is_user_file", lambda file: file == __file__)
    monkeypatch.setattr(barenames, "_walks_left", [16])


class Agent:
    def __init__(self) -> None:
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.parts = [torch.zeros(3, requires_grad=True), torch.zeros(3, requires_grad=True)]

    def step(self, *params: Any, owned: bool = False) -> dict[str, str]:
        return barenames.told([f"param[0][{i}]" for i in range(len(params))], list(params), [owned] * len(params))


def test_names() -> None:
    agent, scale = Agent(), torch.ones(2, requires_grad=True)
    assert agent.step(agent.log_alpha) == {"param[0][0]": "log_alpha"}
    assert agent.step(scale) == {"param[0][0]": "scale"}
    assert agent.step(agent.log_alpha, scale) == {"param[0][0]": "log_alpha", "param[0][1]": "scale"}
    assert agent.step(*agent.parts) == {}  # one name for both
    assert agent.step(agent.log_alpha, owned=True) == {}
    assert agent.step(*[torch.ones(1) for _ in range(5)]) == {}  # many: no walk over the frames for them


def test_the_walks_end() -> None:
    agent = Agent()
    assert [bool(agent.step(agent.log_alpha)) for _ in range(17)] == [True] * 16 + [False]
