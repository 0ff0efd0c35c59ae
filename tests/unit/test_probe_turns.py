"""Whether each turn of a loop sends what it has made by itself, read from the source."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from harness.probe import syntax, turns

APART = {
    "norms": """
for name, p in model.named_parameters():
    if p.grad is None:
        continue
    norm = p.grad.detach().norm()
    dist.all_reduce(norm)
    self.history[name] = 0.9 * self.history.get(name, 0.0) + 0.1 * norm.item()
""",
    "branches": """
for p in params:
    if p.grad is None:
        v = torch.zeros(1)
    else:
        v = p.grad.norm().reshape(1)
    with torch.no_grad():
        v = v * scale
        dist.all_reduce(v)
    total += v
""",
    "inside a branch": """
for p in params:
    if p.grad is not None:
        v = p.grad.norm()
        dist.all_reduce(v)
        v /= world
        p.seen = v
""",
    "an index": """
for c in range(num_classes):
    hits = (labels == c).sum()
    dist.all_reduce(hits)
""",
}
GOES_ON = {
    "an iterate": """
for _ in range(40):
    v = a @ v
    s = v.dot(v)
    dist.all_reduce(s)
    v = v / s.sqrt()
""",
    "an iterate in place": """
for _ in range(40):
    torch.mv(a, v, out=u)
    s = u.dot(u)
    dist.all_reduce(s)
    v.copy_(u / s)
""",
    "layers": """
for layer in layers:
    x = layer(x)
    dist.all_reduce(x)
""",
    "a sum": """
for p in params:
    total += p.norm()
    dist.all_reduce(total)
""",
    "a state of the object": """
for p in params:
    s = (self.v * p).sum()
    dist.all_reduce(s)
    self.v = self.v - s
""",
    "a search that ends": """
for lr in candidates:
    loss = evaluate(lr)
    dist.all_reduce(loss)
    if loss < best:
        break
""",
    "a while": """
while todo:
    s = todo.pop().sum()
    dist.all_reduce(s)
""",
    "sometimes its own": """
for p in params:
    if p.requires_grad:
        last = p.norm()
    dist.all_reduce(last)
""",
    "no loop": """
v = loss.detach()
dist.all_reduce(v)
""",
}


def asked(tmp_path: Path, source: str, *wanted: tuple[str, str]) -> bool:
    file = tmp_path / "train.py"
    file.write_text(source)
    linecache.clearcache()
    syntax.tree.cache_clear()
    lines = source.splitlines()
    return turns.apart([(str(file), next(i for i, t in enumerate(lines, 1) if text in t), function) for text, function in wanted], "all_reduce")


@pytest.mark.parametrize("name", APART)
def test_what_a_turn_has_made_by_itself(tmp_path: Path, name: str) -> None:
    assert asked(tmp_path, APART[name], ("all_reduce", "step"))


@pytest.mark.parametrize("name", GOES_ON)
def test_what_goes_on_from_turn_to_turn_or_is_open(tmp_path: Path, name: str) -> None:
    assert not asked(tmp_path, GOES_ON[name], ("all_reduce", "step"))


HELPER = """
def mean(value):
    dist.all_reduce(value)
    return value / world

def report(metrics):
    return {key: mean(v.detach().mean()) for key, v in metrics.items()}

def solve(p, r):
    for i in range(30):
        q = a @ p
        alpha = r / mean(p.dot(q))
        p = p + alpha * q

def train(micros):
    for x in micros:
        out = model(x)
"""


def test_a_helper_is_asked_where_it_is_called(tmp_path: Path) -> None:
    assert asked(tmp_path, HELPER, ("all_reduce(value)", "mean"), ("for key", "report"))
    assert not asked(tmp_path, HELPER, ("all_reduce(value)", "mean"), ("alpha = r", "solve"))
    assert not asked(tmp_path, HELPER, ("all_reduce(value)", "mean"), ("model(x)", "train"))  # a forward in between, of which the source says nothing
    assert not asked(tmp_path, HELPER, ("all_reduce(value)", "mean"))
