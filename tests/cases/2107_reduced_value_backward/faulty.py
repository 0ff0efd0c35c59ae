"""Blob segmentation: image and mask files on disk, a small U-Net, Dice + BCE loss."""
import argparse
import os
import pathlib

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


def write_files(folder, n, size=32, seed=0):
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[:size, :size]
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        mask = np.zeros((size, size), dtype=bool)
        for _ in range(rng.integers(1, 4)):
            cy, cx, r = rng.uniform(4, size - 4), rng.uniform(4, size - 4), rng.uniform(3, 7)
            mask |= (yy - cy) ** 2 + (xx - cx) ** 2 < r * r
        image = mask * 1.0 + 0.8 * rng.standard_normal((size, size))
        np.savez(folder / f"{i:04d}.npz", image=image.astype("float32"), mask=mask)


class BlobFiles(Dataset):
    def __init__(self, folder):
        self.files = sorted(folder.glob("*.npz"))

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with np.load(self.files[i]) as f:
            return torch.from_numpy(f["image"])[None], torch.from_numpy(f["mask"].astype("float32"))[None]


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.down1, self.down2, self.mid = block(1, c), block(c, 2 * c), block(2 * c, 2 * c)
        self.up1, self.up2 = block(4 * c, c), block(2 * c, c)
        self.out = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        m = self.mid(F.max_pool2d(b, 2))
        u = self.up1(torch.cat([F.interpolate(m, scale_factor=2), b], 1))
        u = self.up2(torch.cat([F.interpolate(u, scale_factor=2), a], 1))
        return self.out(u)


def segmentation_loss(logits, mask):
    prob = logits.sigmoid()
    inter = (prob * mask).sum((1, 2, 3))
    dice = 1 - (2 * inter + 1) / (prob.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
    return dice.mean() + F.binary_cross_entropy_with_logits(logits, mask)


def reduce_mean(value):
    dist.all_reduce(value, op=dist.ReduceOp.SUM)
    return value / dist.get_world_size()


def train_one_epoch(model, loader, optimizer, epoch, rank):
    model.train()
    history = []
    for image, mask in loader:
        loss = segmentation_loss(model(image), mask)
        optimizer.zero_grad()
        loss = reduce_mean(loss)
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    if rank == 0:
        print(f"epoch {epoch}: loss {sum(history) / len(history):.4f}", flush=True)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    counts = torch.zeros(2)
    for image, mask in loader:
        pred, truth = model(image) > 0, mask > 0.5
        counts += torch.tensor([(pred & truth).sum().item(), (pred | truth).sum().item()])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--root", default="blobs")
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=10)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    root = pathlib.Path(args.root)
    if rank == 0:
        write_files(root / "train", 160, seed=1)
        write_files(root / "val", 40, seed=2)
    dist.barrier()

    torch.manual_seed(17)
    model = DistributedDataParallel(UNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    train = BlobFiles(root / "train")
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)
    val = BlobFiles(root / "val")
    val_loader = DataLoader(val, args.batch_size, sampler=DistributedSampler(val, shuffle=False))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(model, loader, optimizer, epoch, rank)
        iou = validate(model, val_loader)
        if rank == 0:
            print(f"          IoU {iou:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "unet.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
