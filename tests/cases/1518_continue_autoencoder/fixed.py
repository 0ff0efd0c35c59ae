"""Variational autoencoder that is interrupted and continued with its random state."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class VAE(nn.Module):
    def __init__(self, dim=24, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, 48), nn.ReLU(), nn.Linear(48, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, dim))

    def forward(self, x):
        mu, log_var = self.encoder(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        return self.decoder(z), mu, log_var


def elbo(x, parts):
    recon, mu, log_var = parts
    kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1)
    return ((recon - x).pow(2).sum(1) + 0.2 * kl).mean()


def curves(n=320):
    g = torch.Generator().manual_seed(61)
    t = torch.linspace(0, 3, 24)
    a, b = torch.rand(n, 1, generator=g), torch.rand(n, 1, generator=g)
    return TensorDataset(a * torch.sin((1 + 2 * b) * t) + 0.05 * torch.randn(n, 24, generator=g))


class Session:
    def __init__(self, path, seed):
        self.path = path
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.net = VAE()
        self.model = DDP(self.net)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=3e-3)
        self.data = curves()
        self.sampler = DistributedSampler(self.data, seed=seed)
        self.loader = DataLoader(self.data, batch_size=16, sampler=self.sampler)
        self.next_epoch = 0
        torch.manual_seed(seed + 100 + self.rank)

    def restore(self):
        state = torch.load(self.path)
        self.net.load_state_dict(state["net"])
        self.opt.load_state_dict(state["opt"])
        self.next_epoch = state["next_epoch"]
        torch.set_rng_state(state["rng"][self.rank])

    def save(self):
        rng = [None] * self.world
        dist.all_gather_object(rng, torch.get_rng_state())
        if self.rank == 0:
            state = {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "next_epoch": self.next_epoch, "rng": rng}
            torch.save(state, self.path)
        dist.barrier()

    def train(self, until):
        for epoch in range(self.next_epoch, until):
            self.sampler.set_epoch(epoch)
            total = torch.zeros(2)
            for (x,) in self.loader:
                loss = elbo(x, self.model(x))
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                total += torch.tensor([loss.item() * len(x), len(x)])
            dist.all_reduce(total)
            self.next_epoch = epoch + 1
            if self.rank == 0:
                print(f"epoch {epoch}: loss {(total[0] / total[1]).item():.4f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--first", type=int, default=2)
    ap.add_argument("--total", type=int, default=5)
    ap.add_argument("--path", default="vae_session.pt")
    ap.add_argument("--seed", type=int, default=17)
    args = ap.parse_args()
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    session = Session(args.path, args.seed)
    session.train(args.first)
    session.save()
    del session
    session = Session(args.path, args.seed)
    session.restore()
    session.train(args.total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
