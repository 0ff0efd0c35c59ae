import argparse
import datetime
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def blobs(n, seed, size=16):
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[0:size, 0:size].astype(np.float32)
    out = np.zeros((n, 1, size, size), dtype=np.float32)
    for i in range(n):
        for _ in range(2):
            cx, cy = rng.uniform(3, size - 3, 2)
            s = rng.uniform(1.2, 2.5)
            out[i, 0] += np.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / (2 * s * s))
    return torch.from_numpy(out.clip(0, 1))


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(1, width, 3, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.GELU(),
        )
        self.up = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1), nn.GELU(),
            nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        )

    def forward(self, x):
        return self.up(self.down(x))


def restorations(net, loader, noise, world):
    """Yields (clean, restored, mean squared error over all processes) per batch."""
    net.eval()
    with torch.no_grad():
        for (clean,) in loader:
            restored = net(clean + noise(clean))
            err = ((restored - clean) ** 2).mean().reshape(1)
            parts = [torch.empty(1) for _ in range(world)]
            dist.all_gather(parts, err)
            yield clean, restored, torch.cat(parts).mean().item()


def write_panel(net, loader, noise, rank, world, path, wanted=16):
    rows = []
    for clean, restored, _ in restorations(net, loader, noise, world):
        if rank == 0:
            rows.extend(torch.cat([clean, restored], dim=-1))
        if len(rows) >= wanted:
            break
    if rank == 0:
        grid = torch.stack(rows[:wanted]).squeeze(1).reshape(-1, rows[0].shape[-1])
        np.save(path, grid.numpy())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--sigma", type=float, default=0.4)
    ap.add_argument("--out", default="panels")
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    ddp = DDP(Denoiser())
    opt = torch.optim.AdamW(ddp.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(500 + rank)
    noise = lambda ref: args.sigma * torch.randn(ref.shape, generator=gen)

    train, val = TensorDataset(blobs(2048, 1)), TensorDataset(blobs(384, 2))
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(train, args.batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(val, args.batch, sampler=DistributedSampler(val, num_replicas=world, rank=rank, shuffle=False))
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        seen = torch.zeros(2)
        for (clean,) in loader:
            loss = nn.functional.mse_loss(ddp(clean + noise(clean)), clean)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        errors = [e for _, _, e in restorations(ddp.module, val_loader, noise, world)]
        if rank == 0:
            print(f"epoch {epoch} train {seen[0] / seen[1]:.4f} val {np.mean(errors):.4f}", flush=True)
        if epoch % 2 == 1:
            write_panel(ddp.module, val_loader, noise, rank, world, f"{args.out}/epoch{epoch:03d}.npy")

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
