"""Encoder with cross-layer parameter sharing and activation checkpointing."""
import functools
import os

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def checkpointed(method):
    """recompute this method's activations in the backward pass"""

    @functools.wraps(method)
    def wrapper(self, *tensors):
        if not (self.training and torch.is_grad_enabled()):
            return method(self, *tensors)
        return torch.utils.checkpoint.checkpoint(functools.partial(method, self), *tensors, use_reentrant=True)

    return wrapper


class SharedLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    @checkpointed
    def forward(self, x):
        h = self.n1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Encoder(nn.Module):
    def __init__(self, dim=16, repeats=3):
        super().__init__()
        self.layer, self.repeats = SharedLayer(dim, 2), repeats

    def forward(self, x):
        for _ in range(self.repeats):
            x = self.layer(x)
        return x


class Sorter(nn.Module):
    """say which position holds the largest number"""

    def __init__(self, dim=16, length=7):
        super().__init__()
        self.inp = nn.Linear(1, dim)
        self.pos = nn.Parameter(torch.randn(length, dim) * 0.1)
        self.encoder = Encoder(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(self.encoder(self.inp(x.unsqueeze(-1)) + self.pos)).squeeze(-1)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(Sorter())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    torch.manual_seed(1000 + rank)
    for step in range(40):
        x = torch.rand(24, 7)
        loss = nn.functional.cross_entropy(model(x), x.argmax(1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            m = loss.detach().clone()
            dist.all_reduce(m)
            if rank == 0:
                print(f"step {step}: {m.item() / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
