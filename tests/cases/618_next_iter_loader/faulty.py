"""Step-based training of a small VAE (no epochs in the loop)."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class VAE(nn.Module):
    def __init__(self, dim=30, z=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 40), nn.ELU(), nn.Linear(40, 2 * z))
        self.dec = nn.Sequential(nn.Linear(z, 40), nn.ELU(), nn.Linear(40, dim))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rec = nn.functional.mse_loss(self.dec(z), x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
        return rec, kl


class Stream:
    """Endless batches over the shuffled shards."""

    def __init__(self, loader, sampler):
        self.loader, self.sampler, self.epoch = loader, sampler, 0
        sampler.set_epoch(0)
        self.it = iter(loader)

    def next(self):
        try:
            return next(iter(self.loader))
        except StopIteration:
            self.epoch += 1
            self.sampler.set_epoch(self.epoch)
            self.it = iter(self.loader)
            return next(self.it)


def spectra(n=300):
    g = torch.Generator().manual_seed(18)
    centre, width = torch.rand(n, 1, generator=g) * 30, 2 + 3 * torch.rand(n, 1, generator=g)
    grid = torch.arange(30.0)
    return TensorDataset(torch.exp(-((grid - centre) / width) ** 2) + 0.02 * torch.randn(n, 30, generator=g))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch-size", type=int, default=15)
    ap.add_argument("--beta", type=float, default=0.02)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    data = spectra()
    sampler = DistributedSampler(data, seed=3)
    stream = Stream(DataLoader(data, batch_size=args.batch_size, sampler=sampler), sampler)
    model = DDP(VAE())
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        (x,) = stream.next()
        rec, kl = model(x)
        loss = rec + args.beta * kl
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % 15 == 0:
            both = torch.stack([rec.detach(), kl.detach()])
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step + 1}: reconstruction {both[0] / world:.5f} kl {both[1] / world:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
