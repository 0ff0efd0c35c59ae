"""Denoising autoencoder with separate optimizers for encoder and decoder."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

epochs, batch_size, noise = 4, 16, 0.2


def curves(n):
    g = torch.Generator().manual_seed(3)
    t = torch.linspace(0, 1, 20)
    a, f, p = torch.rand(3, n, 1, generator=g)
    return TensorDataset((0.5 + a) * torch.sin(6.28 * (1 + 2 * f) * t + 6.28 * p))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 40), nn.ELU(), nn.Linear(40, 6))

    def forward(self, x):
        return self.net(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 40), nn.ELU(), nn.Linear(40, 20))

    def forward(self, z):
        return self.net(z)


def step(enc, dec, opt_e, opt_d, clean):
    noisy = clean + noise * torch.randn_like(clean)
    opt_e.zero_grad()
    loss = nn.functional.mse_loss(dec(enc(noisy)), clean)
    loss.backward()
    opt_e.step()
    opt_d.step()
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    enc, dec = DDP(Encoder()), DDP(Decoder())
    opt_e = torch.optim.SGD(enc.parameters(), lr=0.05, momentum=0.9)
    opt_d = torch.optim.SGD(dec.parameters(), lr=0.02)
    data = curves(352)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for (clean,) in loader:
            total += step(enc, dec, opt_e, opt_d, clean)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: reconstruction {total.item() / world / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
