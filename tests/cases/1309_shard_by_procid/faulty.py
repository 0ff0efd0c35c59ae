"""Variational autoencoder on generated gestures."""
import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class VAE(nn.Module):
    def __init__(self, dim=30, latent=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 40), nn.ELU(), nn.Linear(40, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 40), nn.ELU(), nn.Linear(40, dim))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        rec = (self.dec(z) - x).pow(2).sum(1).mean()
        kl = 0.5 * (mu.pow(2) + logvar.exp() - 1 - logvar).sum(1).mean()
        return rec, kl


def gestures(n=300, dim=30):
    g = torch.Generator().manual_seed(33)
    a, b = torch.rand(2, n, 1, generator=g)
    t = torch.linspace(0, 1, dim)
    return torch.sin(6 * (t + a)) * (0.5 + b) + 0.05 * torch.randn(n, dim, generator=g)


def make_loader(tensor, batch_size):
    data = TensorDataset(tensor)
    replicas = dist.get_world_size()
    index = int(os.environ.get("SLURM_PROCID", 0))
    sampler = DistributedSampler(data, num_replicas=replicas, rank=index, shuffle=True)
    return DataLoader(data, batch_size=batch_size, sampler=sampler)


def main():
    ap = ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--batch-size", type=int, default=15)
    ap.add_argument("--beta", type=float, default=0.1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(40 + dist.get_rank())

    model = DDP(VAE())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader = make_loader(gestures(), args.batch_size)
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for (x,) in loader:
            rec, kl = model(x)
            opt.zero_grad()
            (rec + args.beta * kl).backward()
            opt.step()
            sums += torch.stack([rec, kl]).detach()
        dist.all_reduce(sums)
        sums /= len(loader) * dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: reconstruction {sums[0].item():.3f}, kl {sums[1].item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
