"""Variational autoencoder, compiled; the weight of the divergence grows with the step."""
import argparse
import time

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch._dynamo.config.recompile_limit = 128


class VAE(nn.Module):
    def __init__(self, width=24, latent=4, ramp=100):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, width))
        self.ramp = ramp
        self.seen = 0

    def forward(self, x, noise):
        self.seen += 1
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        z = mean + noise * (0.5 * log_var).exp()
        rebuilt = F.mse_loss(self.decoder(z), x)
        divergence = 0.5 * (mean.pow(2) + log_var.exp() - log_var - 1).sum(1).mean()
        return rebuilt + 0.02 * (self.seen / self.ramp) * divergence


def shapes(n=480):
    g = torch.Generator().manual_seed(6)
    t = torch.linspace(0, 3.14, 24)
    a, b = torch.rand(2, n, 1, generator=g)
    return TensorDataset(a * torch.sin(t) + b * torch.cos(2 * t) + 0.05 * torch.randn(n, 24, generator=g))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--backend", default="eager")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(torch.compile(VAE(), backend=args.backend))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = shapes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    noise_gen = torch.Generator().manual_seed(10 + rank)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        begin = time.perf_counter()
        for (x,) in loader:
            loss = model(x, torch.randn(len(x), 4, generator=noise_gen))
            opt.zero_grad()
            loss.backward()
            opt.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f} in {time.perf_counter() - begin:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
