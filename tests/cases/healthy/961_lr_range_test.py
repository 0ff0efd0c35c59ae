"""Learning-rate range test (the loss is meant to blow up at its end), then a one-cycle run with the rate that it chose."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Finder:
    def __init__(self, model, loader, sampler, low=1e-5, high=30.0, steps=36):
        self.model, self.loader, self.sampler = model, loader, sampler
        self.low, self.high, self.steps = low, high, steps

    def run(self):
        keep = copy.deepcopy(self.model.state_dict())
        opt = torch.optim.SGD(self.model.parameters(), lr=self.low, momentum=0.9)
        factor = (self.high / self.low) ** (1 / self.steps)
        smooth, best, curve = None, math.inf, []
        stream = iter(self.loader)
        for i in range(self.steps):
            try:
                x, y = next(stream)
            except StopIteration:
                self.sampler.set_epoch(100 + i)
                stream = iter(self.loader)
                x, y = next(stream)
            loss = F.mse_loss(self.model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            value = loss.detach().clone()
            dist.all_reduce(value)
            value = value.item() / dist.get_world_size()
            smooth = value if smooth is None else 0.7 * smooth + 0.3 * value
            curve.append((opt.param_groups[0]["lr"], smooth))
            best = min(best, smooth)
            if not math.isfinite(smooth) or smooth > 4 * best:
                break
            for group in opt.param_groups:
                group["lr"] *= factor
        self.model.load_state_dict(keep)
        slopes = [(b[1] - a[1], a[0]) for a, b in zip(curve[3:], curve[4:])]
        return min(slopes)[1], len(curve)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5)
    g = torch.Generator().manual_seed(5)
    x = torch.randn(320, 8, generator=g)
    y = torch.sin(x[:, :4]).sum(1, keepdim=True)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)))

    lr, used = Finder(model, loader, sampler).run()
    if rank == 0:
        print(f"range test: {used} steps, chose lr {lr:.5f}")

    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=lr, epochs=5, steps_per_epoch=len(loader))
    for epoch in range(5):
        sampler.set_epoch(epoch + 1)
        meter = torch.zeros(1)
        for xb, yb in loader:
            loss = F.mse_loss(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            cycle.step()
            meter += loss.detach()
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch}: mse {meter.item() / len(loader) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
