"""Whether each turn of a loop sends what it has made by itself, read from the source."""

from __future__ import annotations

import linecache
from pathlib import Path

import pytest

from harness.probe import syntax, turns

IMPORTS = "import torch\nimport torch.distributed as dist\n"
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
    "its own, in place": """
for p in params:
    norm = p.grad.norm()
    norm.mul_(scale)
    dist.all_reduce(norm, group=team)
    norm.div_(world)
    p.grad.div_(norm)
""",
    "a board that is told": """
for name, p in self.model.named_parameters():
    norm = p.grad.norm()
    dist.all_reduce(norm)
    print(name, norm)
    self.rows.append(norm.item() / world)
    torch.cuda.synchronize()
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
    "a state in place": """
for t in temperatures:
    mass = torch.softmax((scores + potential) / t, dim=1).sum(0)
    dist.all_reduce(mass)
    potential.sub_(t * torch.log(mass))
""",
    "layers in place": """
for i, s in enumerate(scale):
    moment = torch.tanh(blocks[i](x)).pow(2).mean(0)
    dist.all_reduce(moment)
    s.copy_(moment.rsqrt())
    x.add_(s)
""",
    "a part of a state": """
for i in range(8):
    s = f(rows, i)
    dist.all_reduce(s)
    rows[i].view(-1).copy_(s)
""",
    "an object": """
for t in times:
    delta = grid.sweep(t)
    dist.all_reduce(delta)
    grid.apply(delta)
""",
    "an object of the object": """
for t in times:
    delta = self.sweep(t)
    dist.all_reduce(delta)
    self.grid.apply(delta)
""",
    "a container": """
for t in times:
    s = f(chain, t)
    dist.all_reduce(s)
    chain.append(s)
""",
    "what a function is given": """
for t in times:
    s = f(state, t)
    dist.all_reduce(s)
    update(state, s)
""",
    "an output": """
for t in times:
    s = f(state, t)
    dist.all_reduce(s)
    torch.add(state, s, out=state)
""",
    "a function of torch": """
for t in times:
    s = f(state, t)
    dist.all_reduce(s)
    torch.relu_(state)
""",
    "groups": """
for e, group in enumerate(groups):
    dist.all_reduce(counts[e], group=group)
""",
    "a group by position": """
for e in range(experts):
    group = groups[e]
    dist.all_reduce(counts[e], dist.ReduceOp.SUM, group)
""",
    "no loop": """
v = loss.detach()
dist.all_reduce(v)
""",
}


def asked(tmp_path: Path, source: str, *wanted: tuple[str, str]) -> bool:
    file = tmp_path / "train.py"
    file.write_text(IMPORTS + source)
    linecache.clearcache()
    syntax.tree.cache_clear()
    lines = file.read_text().splitlines()
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
