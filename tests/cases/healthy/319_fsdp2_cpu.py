"""fully_shard on CPU: each block is a shard group, then the root; a full state dict is put together at the end."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=32, layers=3, classes=6):
        super().__init__()
        self.inp = nn.Linear(10, d)
        self.layers = nn.ModuleList(Block(d) for _ in range(layers))
        self.out = nn.Linear(d, classes)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def batches(rank, world, steps, batch, seed=0):
    """an endless stream: step s of rank r is keyed by (seed, s, r)"""
    w = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
    for s in range(steps):
        g = torch.Generator().manual_seed(1 + seed + s * world + rank)
        x = torch.randn(batch, 10, generator=g)
        yield x, (x @ w).argmax(1)


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=5e-3)
    window = torch.zeros(2)
    for step, (x, y) in enumerate(batches(rank, world, 30, 16)):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optim.step()
        optim.zero_grad()
        window += torch.tensor([loss.item(), 1.0])
        if (step + 1) % 10 == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step + 1} loss {window[0] / window[1]:.4f}")
            window.zero_()
    full = {k: v.full_tensor() for k, v in model.state_dict().items()}  # a collective per entry, on all ranks
    if rank == 0:
        print("gathered", sum(t.numel() for t in full.values()), "parameters")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
