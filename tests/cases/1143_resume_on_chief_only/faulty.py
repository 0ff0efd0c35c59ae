"""Variational autoencoder, continued from an earlier run."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class VAE(nn.Module):
    def __init__(self, dim=40, latent=4):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 48), nn.SiLU(), nn.Linear(48, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 48), nn.SiLU(), nn.Linear(48, dim))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo(x, out, mu, logvar, beta):
    kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
    return F.mse_loss(out, x, reduction="none").sum(1).mean() + beta * kl


def bumps(n=256):
    g = torch.Generator().manual_seed(44)
    center, width = torch.rand(n, 1, generator=g), 0.05 + 0.1 * torch.rand(n, 1, generator=g)
    return TensorDataset(torch.exp(-(((torch.linspace(0, 1, 40) - center) / width) ** 2)))


def session(args, first, last, resume):
    rank = int(os.environ["RANK"])
    torch.manual_seed(first)
    model = DDP(VAE())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    if resume and rank == 0:
        ckpt = torch.load(args.ckpt, map_location="cpu")
        model.module.load_state_dict(ckpt["net"])
        opt.load_state_dict(ckpt["opt"])
        if rank == 0:
            print(f"resumed after epoch {ckpt['epoch']}", flush=True)
    torch.manual_seed(1000 * first + rank)
    data = bumps()
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(first, last):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            loss = elbo(x, *model(x), beta=args.beta)
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.3f}", flush=True)
    if rank == 0:
        torch.save({"net": model.module.state_dict(), "opt": opt.state_dict(), "epoch": last - 1}, args.ckpt)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--ckpt", default="vae.pt")
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--beta", type=float, default=0.1)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    session(args, 0, 3, resume=False)
    session(args, 3, 6, resume=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
