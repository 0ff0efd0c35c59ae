"""Sequence classification with orthogonal recurrent weights, re-projected after each epoch."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CFG = {"epochs": 4, "batch": 20, "lr": 2e-3, "hidden": 24, "classes": 3, "project": ("cell_a", "cell_b")}


class StackedRNN(nn.Module):
    def __init__(self, hidden, classes):
        super().__init__()
        self.inp = nn.Linear(4, hidden)
        self.cell_a = nn.Linear(hidden, hidden, bias=False)
        self.cell_b = nn.Linear(hidden, hidden, bias=False)
        self.mix = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x):
        a = b = x.new_zeros(x.shape[0], self.mix.out_features)
        for t in range(x.shape[1]):
            a = torch.tanh(self.inp(x[:, t]) + self.cell_a(a))
            b = torch.tanh(self.mix(a) + self.cell_b(b))
        return self.out(b)


# ---- small numerics library -------------------------------------------------
def polar(matrix, iterations=12):
    """Newton-Schulz towards the nearest orthogonal matrix."""
    y = matrix / matrix.norm(2)
    for _ in range(iterations):
        y = 1.5 * y - 0.5 * y @ y.t() @ y
    return y


def orthogonalise_(weight):
    with torch.no_grad():
        weight.copy_(polar(weight.double()))


def cast_(net, dtype):
    for p in net.parameters():
        p.data = p.data.to(dtype)


@contextlib.contextmanager
def precision(net, dtype):
    """Iterations that stall in float32 (at 1e-4) run in `dtype`."""
    before = next(net.parameters()).dtype
    cast_(net, dtype)
    yield
    cast_(net, before)


class Projection:
    def __init__(self, names):
        self.names = names

    def after_epoch(self, net):
        with precision(net, torch.float64):
            for name in self.names:
                orthogonalise_(getattr(net, name).weight)


# -----------------------------------------------------------------------------
def signals(n, classes):
    gen = torch.Generator().manual_seed(8)
    label = torch.randint(0, classes, (n,), generator=gen)
    t = torch.arange(10.0)
    wave = torch.sin(t[None, :, None] * (label[:, None, None] + 1) * 0.4 + torch.rand(n, 1, 4, generator=gen) * 6)
    return TensorDataset(wave + 0.1 * torch.randn(n, 10, 4, generator=gen), label)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DDP(StackedRNN(CFG["hidden"], CFG["classes"]))
    opt = torch.optim.RMSprop(model.parameters(), lr=CFG["lr"])
    callbacks = [Projection(CFG["project"])]
    data = signals(400, CFG["classes"])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=CFG["batch"], sampler=sampler)
    for epoch in range(CFG["epochs"]):
        sampler.set_epoch(epoch)
        agg = torch.zeros(2)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
            agg += torch.stack([loss.detach() * len(x), torch.tensor(float(len(x)))])
        for cb in callbacks:
            cb.after_epoch(model.module)
        dist.all_reduce(agg)
        if rank == 0:
            print(f"epoch {epoch + 1}/{CFG['epochs']}  loss {(agg[0] / agg[1]).item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
