"""Fourier-feature network, trained in double precision."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def signal(n=256):
    g = torch.Generator().manual_seed(81)
    t = torch.rand(n, 1, generator=g, dtype=torch.float64)
    return TensorDataset(t, torch.sin(14 * t) + 0.3 * torch.sin(39 * t))


class FourierNet(nn.Module):
    def __init__(self, bands=8, width=32):
        super().__init__()
        self.register_buffer("freq", 2 * math.pi * torch.arange(1, bands + 1, dtype=torch.float32).unsqueeze(0))
        self.net = nn.Sequential(nn.Linear(2 * bands, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, t):
        arg = t @ self.freq
        return self.net(torch.cat([arg.sin(), arg.cos()], dim=1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--bands", type=int, default=8)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)

    net = FourierNet(args.bands).to(device=device, dtype=torch.float64)
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    data = signal()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for t, y in loader:
            loss = (model(t.to(device)) - y.to(device)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
