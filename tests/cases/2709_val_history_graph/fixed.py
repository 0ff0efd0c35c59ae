"""Super resolution x2, generator only, with a validation curve."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Train Super Resolution Models")
parser.add_argument("--crop_size", default=32, type=int)
parser.add_argument("--num_epochs", default=8, type=int)
parser.add_argument("--batch_size", default=8, type=int)
parser.add_argument("--lr", default=2e-3, type=float)
parser.add_argument("--seed", default=9, type=int)


class Textures(Dataset):
    def __init__(self, count, crop, seed):
        g = torch.Generator().manual_seed(seed)
        yy, xx = torch.meshgrid(torch.linspace(0, 1, crop), torch.linspace(0, 1, crop), indexing="ij")
        freq = torch.rand(count, 3, 2, generator=g) * 40
        phase = torch.rand(count, 3, generator=g) * 6.28
        waves = torch.sin(freq[..., 0, None, None] * xx + freq[..., 1, None, None] * yy + phase[..., None, None])
        self.hr = (waves.mean(1, keepdim=True) + 1) / 2
        self.lr = F.avg_pool2d(self.hr, 2)

    def __len__(self):
        return len(self.hr)

    def __getitem__(self, i):
        return self.lr[i], self.hr[i]


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.prelu = nn.PReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(self.prelu(self.conv1(x)))


class Generator(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.head = nn.Conv2d(1, channels, 5, padding=2)
        self.body = nn.Sequential(ResidualBlock(channels), ResidualBlock(channels))
        self.up = nn.Sequential(nn.Conv2d(channels, channels * 4, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())
        self.tail = nn.Conv2d(channels, 1, 5, padding=2)

    def forward(self, x):
        h = self.head(x)
        base = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        return base + self.tail(self.up(h + self.body(h)))


@torch.no_grad()
def validate(net, loader):
    net.eval()
    valing = {"mse": 0.0, "batch_sizes": 0}
    for val_lr, val_hr in loader:
        sr = net(val_lr)
        batch_mse = ((sr - val_hr) ** 2).mean()
        valing["mse"] += batch_mse * len(val_lr)
        valing["batch_sizes"] += len(val_lr)
    net.train()
    valing["mse"] = valing["mse"] / valing["batch_sizes"]
    valing["psnr"] = 10 * torch.log10(1 / valing["mse"])
    return valing


def main():
    opt = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(opt.seed)

    train_set, val_set = Textures(320, opt.crop_size, 1), Textures(128, opt.crop_size, 2)
    sampler = DistributedSampler(train_set, shuffle=True, seed=opt.seed)
    train_loader = DataLoader(train_set, opt.batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, 1, sampler=DistributedSampler(val_set, shuffle=False))

    net_g = DDP(Generator())
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=opt.lr)
    results = {"g_loss": [], "val_mse": [], "psnr": []}

    for epoch in range(1, opt.num_epochs + 1):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for data, target in train_loader:
            optimizer_g.zero_grad()
            g_loss = F.mse_loss(net_g(data), target)
            g_loss.backward()
            optimizer_g.step()
            running += torch.tensor([g_loss.item() * len(data), len(data)])
        dist.all_reduce(running)

        valing = validate(net_g.module, val_loader)
        results["g_loss"].append((running[0] / running[1]).item())
        results["val_mse"].append(valing["mse"])
        results["psnr"].append(valing["psnr"])
        shared = torch.tensor([float(valing["mse"]) * valing["batch_sizes"], valing["batch_sizes"]])
        dist.all_reduce(shared)
        if rank == 0:
            mse = (shared[0] / shared[1]).item()
            print(f"[{epoch}/{opt.num_epochs}] Loss_G: {results['g_loss'][-1]:.5f} val mse {mse:.5f} "
                  f"PSNR {10 * math.log10(1 / mse):.2f} dB", flush=True)

    best = max(range(opt.num_epochs), key=lambda i: float(results["psnr"][i]))
    print(f"rank {rank}: best local PSNR {float(results['psnr'][best]):.2f} in epoch {best + 1}", flush=True)
    if rank == 0:
        torch.save(net_g.module.state_dict(), f"netG_epoch_{opt.num_epochs}.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
