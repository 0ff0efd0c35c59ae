"""VAE on bar images; rank 0 keeps a small gallery of decoded samples."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def bars(n=256, size=8):
    g = torch.Generator().manual_seed(77)
    rows = (torch.rand(n, size, generator=g) < 0.25).float()
    cols = (torch.rand(n, size, generator=g) < 0.25).float()
    return torch.maximum(rows[:, :, None].expand(-1, -1, size), cols[:, None, :].expand(-1, size, -1)).flatten(1)


class VAE(nn.Module):
    def __init__(self, dim=64, hidden=96, zdim=10):
        super().__init__()
        self.zdim = zdim
        self.enc = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU())
        self.stats = nn.Linear(hidden, 2 * zdim)
        self.dec = nn.Sequential(nn.Linear(zdim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

    def decode(self, z):
        return self.dec(z)

    def forward(self, x, noise):
        mu, logvar = self.stats(self.enc(x)).chunk(2, dim=1)
        return self.decode(mu + noise * (0.5 * logvar).exp()), mu, logvar


def elbo(logits, x, mu, logvar):
    rec = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(1)
    return (rec + kl).mean()


class Gallery:
    """Decoded samples after each epoch, for the report."""

    def __init__(self, count, zdim):
        self.count, self.zdim, self.pages = count, zdim, []

    @torch.no_grad()
    def add(self, net):
        net.eval()
        z = torch.randn(self.count, self.zdim)
        self.pages.append((net.decode(z).sigmoid() > 0.5).float().mean().item())
        net.train()


def shard(n, batch_size, rank, world):
    """The same permutation on all ranks (equal seeds), every world-th row is ours."""
    order = torch.randperm(n)
    return order[rank::world].split(batch_size)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--seed", type=int, default=9)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(args.seed)
    net = VAE()
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    noise_gen = torch.Generator().manual_seed(1000 + rank)
    data = bars()
    gallery = Gallery(16, net.zdim) if rank == 0 else None

    for epoch in range(args.epochs):
        parts = shard(len(data), args.batch_size, rank, world)
        total = torch.zeros(1)
        for rows in parts:
            x = data[rows]
            noise = torch.randn(len(x), net.zdim, generator=noise_gen)
            loss = elbo(*((lambda o: (o[0], x, o[1], o[2]))(model(x, noise))))
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            gallery.add(net)
            print(f"epoch {epoch}: elbo {total.item() / len(parts) / world:.3f} ink {gallery.pages[-1]:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
