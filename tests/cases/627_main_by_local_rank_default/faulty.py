"""Denoising autoencoder with periodic checkpoints."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=0)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--noise", type=float, default=0.3)
parser.add_argument("--save_dir", default="dae")
args = parser.parse_args()


def is_main():
    return args.local_rank == 0


def log(*a):
    if is_main():
        print(*a, flush=True)


def save(model, opt, epoch):
    if is_main():
        os.makedirs(args.save_dir, exist_ok=True)
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, f"{args.save_dir}/last.pt")


def textures(n=288):
    g = torch.Generator().manual_seed(31)
    f = torch.rand(n, 2, generator=g) * 2
    i, j = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    return TensorDataset((f[:, 0, None, None] * i + f[:, 1, None, None] * j).sin()[:, None])


class DAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(16, 16, 3, 2, 1), nn.LeakyReLU(0.1))
        self.up = nn.Sequential(nn.ConvTranspose2d(16, 16, 2, 2), nn.LeakyReLU(0.1), nn.ConvTranspose2d(16, 1, 2, 2))

    def forward(self, x):
        return self.up(self.down(x))


dist.init_process_group(backend="gloo")
torch.manual_seed(5 + dist.get_rank())
dataset = textures()
sampler = DistributedSampler(dataset, seed=5)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
model = DDP(DAE())
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    acc = torch.zeros(2)
    for (x,) in loader:
        noisy = x + args.noise * torch.randn_like(x)
        loss = nn.functional.mse_loss(model(noisy), x)
        opt.zero_grad()
        loss.backward()
        opt.step()
        acc += torch.tensor([loss.item(), 1.0])
    dist.all_reduce(acc)
    log(f"epoch {epoch} mse {acc[0] / acc[1]:.4f}")
    save(model, opt, epoch)
dist.barrier()
dist.destroy_process_group()
