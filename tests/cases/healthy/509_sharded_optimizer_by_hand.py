"""Each process owns the optimizer state of a part of the parameters."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class ShardedOptimizer:
    """greedy partition by size; owners step, then broadcast what they changed"""

    def __init__(self, params, factory):
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        load = [0] * self.world
        self.owner = {}
        for p in sorted(self.params, key=lambda p: -p.numel()):
            k = load.index(min(load))
            self.owner[p] = k
            load[k] += p.numel()
        self.inner = factory([p for p in self.params if self.owner[p] == self.rank])

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        self.inner.step()
        handles = [dist.broadcast(p.data, src=self.owner[p], async_op=True) for p in self.params]
        for h in handles:
            h.wait()


def data(rank, batch=40):
    g = torch.Generator().manual_seed(rank)
    while True:
        x = torch.randn(batch, 12, generator=g)
        yield x, (x[:, :4] * x[:, 4:8]).sum(1, keepdim=True) - x[:, 8:].abs().sum(1, keepdim=True) * 0.5


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)))
    opt = ShardedOptimizer(model.parameters(), lambda ps: torch.optim.Adam(ps, lr=3e-3))
    for step, (x, y) in zip(range(50), data(rank)):
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item() / dist.get_world_size():.4f}")
    held = sum(p.numel() for g in opt.inner.param_groups for p in g["params"])
    print(f"rank {rank} owns {held} of {sum(p.numel() for p in model.parameters())} elements")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
