"""Encoder and decoder trained jointly, gradients averaged by hand."""
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn


def broadcast_module(module, src=0):
    for p in module.parameters():
        dist.broadcast(p.data, src)


class GradientAverager:
    def __init__(self, parameters):
        self.parameters = parameters
        self.world = dist.get_world_size()

    def __call__(self):
        for p in self.parameters:
            dist.all_reduce(p.grad)
            p.grad.mul_(1.0 / self.world)


def chirps(gen, n, length=24):
    t = torch.linspace(0, 1, length)
    rate = 1 + 3 * torch.rand(n, 1, generator=gen)
    return torch.sin(6 * rate * t**2 + 2 * torch.rand(n, 1, generator=gen))


def main():
    dist.init_process_group("gloo", init_method="env://")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(100 + rank)
    encoder = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
    decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 24))
    for m in (encoder, decoder):
        broadcast_module(m)
    params = list(itertools.chain(encoder.parameters(), decoder.parameters()))
    optimizer = torch.optim.Adam(params, lr=4e-3)
    average = GradientAverager(params)
    gen = torch.Generator().manual_seed(rank)
    for step in range(60):
        x = chirps(gen, 32)
        code = encoder(x)
        loss = nn.functional.mse_loss(decoder(code), x) + 1e-3 * code.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        average()
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                t = loss / world
                dist.all_reduce(t)
            if rank == 0:
                print(f"[{step + 1}/60] {t.item():.4f}")
    if rank == 0:
        torch.save([encoder.state_dict(), decoder.state_dict()], "codec.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
