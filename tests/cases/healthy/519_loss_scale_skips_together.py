"""Dynamic loss scaling without GradScaler."""
import os

import torch
import torch.distributed as dist
from torch import nn


class DynamicScale:
    def __init__(self, scale=2.0**10, growth_every=12):
        self.scale, self.growth_every, self.good, self.skipped = scale, growth_every, 0, 0

    def overflowed(self, params):
        flag = torch.tensor(float(any(not p.grad.isfinite().all() for p in params)))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() > 0

    def update(self, overflow):
        if overflow:
            self.scale, self.good = self.scale / 2, 0
            self.skipped += 1
        else:
            self.good += 1
            if self.good % self.growth_every == 0:
                self.scale *= 2


def average(params):
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, g in zip(params, flat.split([p.numel() for p in params])):
        p.grad = g.view_as(p).clone()


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 48), nn.Tanh(), nn.Linear(48, 2))
    params = list(net.parameters())
    for p in params:
        dist.broadcast(p.data, 0)
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    scaler, gen = DynamicScale(), torch.Generator().manual_seed(rank)
    for step in range(60):
        x = torch.randn(32, 7, generator=gen)
        y = torch.stack([x[:, :3].sum(1).sin(), x[:, 3:].mean(1)], 1)
        loss = nn.functional.mse_loss(net(x), y)
        opt.zero_grad()
        factor = scaler.scale * (float("inf") if rank == 1 and step in (9, 33) else 1.0)  # a simulated overflow
        (loss * factor).backward()
        overflow = scaler.overflowed(params)
        if not overflow:
            average(params)
            for p in params:
                p.grad /= scaler.scale
            opt.step()
        scaler.update(overflow)
        if step % 20 == 19:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item() / dist.get_world_size():.4f} scale {scaler.scale:.0f} skipped {scaler.skipped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
