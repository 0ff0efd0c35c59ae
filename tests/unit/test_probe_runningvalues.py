"""Running values of a module: told where forward computes with them, and none of their neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.probe import names, runningvalues
from harness.probe.sensors import runningstate
from harness.probe.state import S

torch = pytest.importorskip("torch")
nn = torch.nn


class Running(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.mid = torch.zeros(4)
        self.low = torch.zeros(4)
        self.top = torch.zeros(4)
        self.last = torch.zeros(4)
        self.seen = torch.zeros(4)
        self.usage = torch.zeros(4)
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        if self.training:
            self.mid.lerp_(x.mean(0), 0.1)
            self.low = torch.minimum(self.low, x.amin(0))
            self.usage = 0.9 * self.usage + 0.1 * (x - self.usage).mean(0)
            self._follow(x)
        self.last = self.lin(self.last + x.mean(0)).detach()
        return self.lin((x - self.mid) / (1 + self.top) - self.low) + self.last

    def _follow(self, x: Any) -> None:
        self.top.mul_(0.9).add_(x.amax(0), alpha=0.1)
        self.seen += x.sum(0)


class Neighbours(Running):
    """Each value is the state of a sequence, or of training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = torch.zeros(4)
        self.scale = torch.ones(4)

    @property
    def broken(self) -> Any:
        raise NotImplementedError

    def reset(self) -> None:
        self.trace = torch.zeros(4)
        self.mid.zero_()

    def forward(self, x: Any) -> Any:
        self.trace = 0.9 * self.trace + x.mean(0)
        out = self.lin(x + self.trace - self.mid)
        self.mid.lerp_(x.mean(0), 0.1)
        if not self.training:
            return out
        self.scale = 0.9 * self.scale + 0.1 * out.detach().std(0)
        return out / self.scale


class Declared(Running):
    def get_extra_state(self) -> Any:
        return {"mid": self.mid}


def test_what_forward_computes_with() -> None:
    found = runningvalues.attributes(Running)
    assert set(found) == {"mid", "top"} and found["top"][2] == "_follow"
    assert runningvalues.attributes(Neighbours) == {}
    assert runningvalues.attributes(Declared) == {} and runningvalues.attributes(nn.Linear) == {}


def test_who_names_it(tmp_path: Path) -> None:
    def outside(text: str) -> bool:
        (file := tmp_path / f"{abs(hash(text))}.py").write_text("class A:\n    def f(self):\n        return self.mean\n" + text)
        return runningvalues.named_outside(str(file), "mean", {"A"})

    assert not outside("x.mean(0)\nprint('mean')\n")
    assert outside("save(a.mean)\n") and outside("d['mean'] = 1\n") and outside("getattr(a, 'mean')\n") and outside("save({'mean': a})\n")


def test_the_file_lacks_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    model = Running()
    monkeypatch.setattr(S, "steps", 0)
    monkeypatch.setattr(names, "root_modules", lambda: [model])
    monkeypatch.setattr(runningvalues, "named_outside", lambda *a: False)
    monkeypatch.setattr(runningstate, "_num_saves", [0])
    monkeypatch.setattr(S, "recorder", type("Told", (), {"event": lambda self, kind, site=None, **f: told.append({"kind": kind, **f}), "errors": 0})())
    runningstate._look(None, None, [])
    runningstate._at_save(model.state_dict(), ("t.py", 1, ""), "m.pt")
    assert told == []  # as it was made
    model(torch.ones(2, 4))
    runningstate._at_save({"epoch": 1}, ("t.py", 1, ""), "m.pt")
    runningstate._at_save({"model": model.state_dict(), "mid": model.mid, "top": model.top}, ("t.py", 1, ""), "m.pt")
    runningstate._at_save({"model": model.state_dict(), "stats": [model.mid.clone(), model.top.clone()]}, ("t.py", 1, ""), "m.pt")
    assert told == []
    runningstate._at_save({"model": model.state_dict()}, ("t.py", 1, ""), "m.pt")
    runningstate._at_save({"model": model.state_dict()}, ("t.py", 1, ""), "m.pt")
    assert [(e["kind"], e["names"], e["module"]) for e in told] == [("running_unsaved", ["mid", "top"], "Running")]
