"""What the source does with a copy of the weights that a name holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.probe import cuts, writtenback
from harness.probe.heldvalues import ATTRIBUTE, EVERYWHERE, Name

FUNCTIONS = """
def validate(net, ema):
    kept = [p.detach().clone() for p in net.parameters()]
    ema.copy_to(net.parameters())
    {}
    return evaluate(net)

def put_back(net, values):
    for p, v in zip(net.parameters(), values):
        p.copy_(v)
"""
LOCAL = {
    "pass": False,
    "return kept": False,  # bound to a name of the caller's, which is looked at as well
    "assert kept is not None": False,
    "other = kept": False,
    "kept.clear()": False,
    "if decided: net.load_state_dict(kept)": True,  # and it did not: so it was decided
    "for p, k in zip(net.parameters(), kept): p.data = k": True,
    "put_back(net, kept)": True,
    "drift = sum((p - k).norm() for p, k in zip(net.parameters(), kept))": True,
    "torch.save(kept, 'last.pt')": True,
    "best = kept if score > best_score else best; torch.save(best, 'best.pt')": True,
    "return {'raw': kept, 'loss': 1.0}": True,
    "yield kept": True,
    "threading.Thread(target=write, args=(kept,)).start()": True,
}

CLASS = """
class Ema:
    def store(self, params):
        self.stash = [p.detach().clone() for p in params]

    def store_in_place(self, params):
        for s, p in zip(self.stash, params):
            s.copy_(p)
        torch._foreach_copy_(self.stash, params)
        self.stash[0] = params[0].clone()

    def restore(self, params):
        if self.stash is None:
            raise RuntimeError
        stash = self.stash
        for s, p in zip(stash, params):
            p.copy_(s)
        self.stash = None

def main(net, ema):
    ema.store(net.parameters())
    {}
"""
ATTRIBUTES = {
    "pass": False,
    "if score < best: ema.restore(net.parameters())": True,
    "hooks.append(ema.restore)": True,
    "torch.save(ema.stash, 'raw.pt')": True,
    "print(len(ema.stash))": True,
    "ema.stash.clear()": False,
    "torch.save({k: v for k, v in ema.__dict__.items()}, 'raw.pt')": True,  # read by a name that is not written down
    "torch.save(vars(ema), 'raw.pt')": True,
    "torch.save(getattr(ema, field), 'raw.pt')": True,
    "inner = getattr(net, 'module', net)": False,
}


def source(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> str:
    file = tmp_path / "train.py"
    file.write_text(text)
    monkeypatch.setattr(cuts, "user_files", lambda: [str(file)])
    return str(file)


@pytest.mark.parametrize("statement", LOCAL)
def test_a_variable(statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(tmp_path, FUNCTIONS.format(statement), monkeypatch)
    assert writtenback.has_use(Name((file,), 4, "kept")) is LOCAL[statement]


@pytest.mark.parametrize("statement", ATTRIBUTES)
def test_an_attribute(statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = source(tmp_path, CLASS.format(statement), monkeypatch)
    assert writtenback.has_use(Name((file,), ATTRIBUTE, "stash")) is ATTRIBUTES[statement]


def test_a_variable_of_the_module_is_read_in_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "kept = copy.deepcopy(net.state_dict())\ndef show(): print(kept)\ndef other(kept): print(kept)\n"
    file = source(tmp_path, text, monkeypatch)
    assert writtenback.has_use(Name((file,), EVERYWHERE, "kept"))
    other = source(tmp_path.joinpath("b").mkdir() or tmp_path / "b", text.replace("def show(): print(kept)\n", ""), monkeypatch)
    assert not writtenback.has_use(Name((other,), EVERYWHERE, "kept"))


def test_without_source_nobody_knows() -> None:
    assert writtenback.has_use(Name((), EVERYWHERE, "kept")) and writtenback.has_use(Name(("<string>",), 3, "kept"))
