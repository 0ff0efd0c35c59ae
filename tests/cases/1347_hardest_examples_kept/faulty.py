"""Regression on generated fields; the hardest inputs of the run are kept for inspection."""
import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Fields:
    """Endless batches of smooth random fields, different ones on every rank."""

    def __init__(self, batch, size, seed):
        self.batch, self.size = batch, size
        self.gen = torch.Generator().manual_seed(seed)
        self.grid = torch.linspace(0, 1, size * size)

    def __iter__(self):
        while True:
            amp = torch.randn(self.batch, 1, generator=self.gen)
            freq = 1 + 3 * torch.rand(self.batch, 1, generator=self.gen)
            yield amp * torch.sin(6.28 * freq * self.grid), amp.squeeze(1) * freq.squeeze(1)


class Gallery:
    def __init__(self):
        self.rows = []

    def look(self, x, losses):
        worst = losses.argmax().item()
        self.rows.append((losses[worst].item(), x[worst]))

    def top(self, k):
        return sorted(self.rows, key=lambda row: -row[0])[:k]


class Net(nn.Module):
    def __init__(self, inputs, width=24):
        super().__init__()
        self.pool = nn.AvgPool1d(32)
        self.net = nn.Sequential(nn.Linear(inputs // 32, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x):
        return self.net(self.pool(x.unsqueeze(1)).squeeze(1)).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=250)
    ap.add_argument("--batch", type=int, default=80)
    ap.add_argument("--size", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Net(args.size**2))
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    gallery = Gallery()

    for step, (x, y) in enumerate(Fields(args.batch, args.size, seed=60 + rank), start=1):
        losses = (model(x) - y).pow(2)
        opt.zero_grad()
        losses.mean().backward()
        opt.step()
        gallery.look(x, losses.detach())
        if step % 50 == 0:
            mean = losses.detach().mean()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / world:.4f}", flush=True)
        if step == args.steps:
            break
    hardest = gallery.top(16)
    torch.save(torch.stack([x for _, x in hardest]), f"hardest_{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
