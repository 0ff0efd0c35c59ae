"""Denoising autoencoder with averaged meters."""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class SmoothedValue:
    def __init__(self):
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.total += value * n
        self.count += n

    def synchronize(self):
        t = torch.tensor([self.total, float(self.count)], dtype=torch.float64)
        dist.all_reduce(t)
        return t.tolist()

    @property
    def avg(self):
        total, count = self.synchronize()
        return total / max(count, 1)

    def __format__(self, spec):
        return format(self.avg, spec or ".4f")


class ProgressLine:
    def __init__(self, every, out=sys.stdout):
        self.every, self.out = every, out

    def __call__(self, iterable, meters, prefix=""):
        main_process = int(os.environ.get("RANK", "0")) == 0
        for i, item in enumerate(iterable, 1):
            yield item
            if main_process and i % self.every == 0:
                shown = "  ".join(f"{name}: {meter:.4f}" for name, meter in meters.items())
                self.out.write(f"{prefix} [{i}/{len(iterable)}] local {shown}\n")


def curves(n=480):
    g = torch.Generator().manual_seed(17)
    a, b = torch.rand(n, 1, generator=g), torch.rand(n, 1, generator=g)
    t = torch.linspace(0, 1, 20)
    return torch.sin(6 * (t + a)) * b


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(curves())
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=24, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 20)))
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    progress = ProgressLine(every=5)
    gen = torch.Generator().manual_seed(90 + dist.get_rank())
    for epoch in range(4):
        sampler.set_epoch(epoch)
        meters = {"loss": SmoothedValue(), "grad": SmoothedValue()}
        for (x,) in progress(loader, meters, f"epoch {epoch}"):
            noisy = x + 0.1 * torch.randn(x.shape, generator=gen)
            loss = nn.functional.mse_loss(model(noisy), x)
            opt.zero_grad()
            loss.backward()
            meters["grad"].update(nn.utils.clip_grad_norm_(model.parameters(), 5.0).item())
            opt.step()
            meters["loss"].update(loss.item(), len(x))
        loss = meters["loss"].avg
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mean loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
