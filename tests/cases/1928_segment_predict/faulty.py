"""Segmentation of blobs; after training the masks of the test set are written to disk."""
import os
from glob import glob
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CFG = SimpleNamespace(size=20, train=384, test=96, batch=16, epochs=4, lr=1e-2, out="masks")


def blobs(n, seed):
    rng = np.random.default_rng(seed)
    yy, xx = np.mgrid[: CFG.size, : CFG.size]
    images, masks = [], []
    for _ in range(n):
        cy, cx, r = rng.uniform(5, CFG.size - 5, 2).tolist() + [rng.uniform(2.5, 5)]
        mask = (yy - cy) ** 2 + (xx - cx) ** 2 < r * r
        images.append(mask * rng.uniform(0.8, 1.4) + rng.normal(0, 0.5, mask.shape))
        masks.append(mask)
    x = torch.tensor(np.stack(images), dtype=torch.float32)[:, None]
    return TensorDataset(x, torch.tensor(np.stack(masks), dtype=torch.float32)[:, None])


class UNet(nn.Module):
    def __init__(self, c=10):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(c, 2 * c, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.up = nn.Sequential(nn.Conv2d(3 * c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, 1, 1))

    def forward(self, x):
        d = self.down(x)
        return self.up(torch.cat([d, self.low(d)], dim=1))


def dice_loss(logits, mask):
    p = logits.sigmoid()
    inter = (p * mask).sum((1, 2, 3))
    return (1 - (2 * inter + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)).mean()


def fit(model, data, rank):
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, CFG.batch, sampler=sampler)
    opt = torch.optim.Adam(model.parameters(), lr=CFG.lr)
    for epoch in range(CFG.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(2)
        for x, m in loader:
            logits = model(x)
            loss = dice_loss(logits, m) + nn.functional.binary_cross_entropy_with_logits(logits, m)
            opt.zero_grad()
            loss.backward()
            opt.step()
            seen += torch.tensor([loss.item(), 1.0])
        dist.all_reduce(seen)
        if rank == 0:
            print(f"epoch {epoch}: loss {(seen[0] / seen[1]).item():.4f}", flush=True)


@torch.no_grad()
def write_masks(model, data, rank, world):
    model.eval()
    mine = list(range(rank, len(data), world))
    masks = []
    for x, _ in DataLoader(Subset(data, mine), 32):
        masks.append((model.module(x) > 0).squeeze(1))
    target = os.path.join(CFG.out, "test.npz")
    np.savez_compressed(target, index=np.array(mine), mask=torch.cat(masks).numpy())
    dist.barrier()


def report(data):
    total, iou = 0, 0.0
    for path in sorted(glob(os.path.join(CFG.out, "*.npz"))):
        with np.load(path) as z:
            for i, mask in zip(z["index"], z["mask"]):
                truth = data[int(i)][1][0].numpy() > 0
                iou += (mask & truth).sum() / max(1, (mask | truth).sum())
                total += 1
    print(f"{total} masks in {CFG.out}/, mean IoU {iou / total:.3f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    train, test = blobs(CFG.train, 1), blobs(CFG.test, 2)
    model = DDP(UNet())
    fit(model, train, rank)
    os.makedirs(CFG.out, exist_ok=True)
    write_masks(model, test, rank, world)
    if rank == 0:
        report(test)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
