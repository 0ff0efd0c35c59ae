"""Small variational autoencoder on generated bars."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Config:
    epochs: int = 4
    batch_size: int = 16
    latent: int = 4
    lr: float = 2e-3
    seed: int = 11


def bars(n=256, size=8):
    g = torch.Generator().manual_seed(5)
    img = torch.zeros(n, size, size)
    for i in range(n):
        pos = int(torch.randint(0, size, (1,), generator=g))
        if i % 2:
            img[i, pos] = 1.0
        else:
            img[i, :, pos] = 1.0
    return TensorDataset(img.flatten(1))


class VAE(nn.Module):
    def __init__(self, dim, latent):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.dec = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, dim))

    def forward(self, x):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar


def elbo_loss(out, x):
    recon, mu, logvar = out
    bce = F.binary_cross_entropy_with_logits(recon, x, reduction="none").sum(1)
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1)
    return (bce + kl).mean()


def setup():
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group(backend="nccl")
    return device, dist.get_rank(), dist.get_world_size()


def main(cfg):
    device, rank, world = setup()
    torch.manual_seed(cfg.seed)
    model = DDP(VAE(64, cfg.latent).to(device))
    torch.manual_seed(cfg.seed + 1 + rank)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    data = bars()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=cfg.batch_size, sampler=sampler)
    for epoch in range(cfg.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, device=device)
        for (x,) in loader:
            x = x.to(device)
            loss = elbo_loss(model(x), x)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: -elbo {total.item() / (world * len(loader)):.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
