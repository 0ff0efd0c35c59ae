"""Forecast of the next day's load from the last week, mixed precision with a gradient scaler."""
import argparse
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Load(Dataset):
    """Sliding windows over an hourly series with a daily and a weekly cycle and a few spikes."""

    def __init__(self, hours, seed, past=168, ahead=24, stride=4):
        g = torch.Generator().manual_seed(seed)
        t = torch.arange(hours).float()
        series = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 168) + 0.2 * torch.randn(hours, generator=g)
        spikes = torch.rand(hours, generator=g) < 0.004
        self.series = series + 6 * spikes
        self.past, self.ahead, self.stride = past, ahead, stride

    def __len__(self):
        return (len(self.series) - self.past - self.ahead) // self.stride

    def __getitem__(self, i):
        at = i * self.stride
        return self.series[at : at + self.past], self.series[at + self.past : at + self.past + self.ahead]


class Forecaster(nn.Module):
    def __init__(self, past=168, ahead=24, width=128):
        super().__init__()
        self.days = nn.GRU(24, width, batch_first=True)
        self.out = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, ahead))

    def forward(self, x):
        hidden, _ = self.days(x.view(len(x), -1, 24))
        return self.out(hidden[:, -1])


class Clipper:
    """Limits every entry of the gradient to [-limit, limit]."""

    def __init__(self, net, limit):
        self.net, self.limit = net, limit

    def install(self):
        for p in self.net.parameters():
            p.register_hook(lambda grad: grad.clamp(-self.limit, self.limit))

    def apply(self, scaler, opt):
        scaler.unscale_(opt)
        nn.utils.clip_grad_value_(self.net.parameters(), self.limit)


def average(value):
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--clip", type=float, default=0.05)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(25)
    data = Load(3000, seed=1)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler, drop_last=True)
    net = Forecaster()
    clipper = Clipper(net, args.clip)
    clipper.install()
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for past, ahead in loader:
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                forecast = model(past)
            loss = nn.functional.smooth_l1_loss(forecast.float(), ahead)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            total += loss.detach()
        mean = average(total / len(loader))
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, scale {scaler.get_scale():.0f}", flush=True)
    if dist.get_rank() == 0:
        torch.save(net.state_dict(), "forecast.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
