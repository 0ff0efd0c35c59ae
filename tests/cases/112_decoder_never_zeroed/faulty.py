"""Denoising autoencoder whose two halves have optimizers of their own."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Config:
    steps: int = 160
    batch: int = 32
    lr_encoder: float = 2e-3
    lr_decoder: float = 0.8
    noise: float = 0.3
    log_every: int = 40


class Profiles:
    """Bell curves with random place and width; every rank draws its own."""

    def __init__(self, rank):
        self.gen = torch.Generator().manual_seed(4000 + rank)
        self.grid = torch.linspace(-1, 1, 40)

    def draw(self, n):
        mid = torch.rand(n, 1, generator=self.gen) - 0.5
        width = 0.1 + 0.2 * torch.rand(n, 1, generator=self.gen)
        return torch.exp(-(((self.grid - mid) / width) ** 2))

    def corrupt(self, x, noise):
        return x + noise * torch.randn(x.shape, generator=self.gen)


def training(cfg, encoder, decoder, source):
    """Generator: does one step each time it is asked for the next loss."""
    opt_enc = torch.optim.Adam(encoder.parameters(), lr=cfg.lr_encoder)
    opt_dec = torch.optim.SGD(decoder.parameters(), lr=cfg.lr_decoder)
    for _ in range(cfg.steps):
        clean = source.draw(cfg.batch)
        restored = decoder(encoder(source.corrupt(clean, cfg.noise)))
        loss = nn.functional.mse_loss(restored, clean)
        opt_enc.zero_grad()
        loss.backward()
        opt_enc.step()
        opt_dec.step()
        yield loss.detach()


def main(cfg):
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(9)
    encoder = DDP(nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 4)))
    decoder = DDP(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 40)))

    window = torch.zeros(())
    for step, loss in enumerate(training(cfg, encoder, decoder, Profiles(rank)), start=1):
        window += loss
        if step % cfg.log_every == 0:
            dist.all_reduce(window)
            if rank == 0:
                print(f"step {step}: mse {window.item() / world / cfg.log_every:.5f}")
            window = torch.zeros(())

    if rank == 0:
        torch.save({"encoder": encoder.module.state_dict(), "decoder": decoder.module.state_dict()}, "dae.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Config())
