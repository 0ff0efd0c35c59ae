"""Segmentation with a home-made synchronised norm; memmap tiles, augmentation in the collate, dihedral test-time views."""
import argparse
import contextlib
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIZE = 24


def write_tiles(path, n, seed):
    rng = np.random.default_rng(seed)
    tiles = np.memmap(path, dtype=np.float32, mode="w+", shape=(n, 2, SIZE, SIZE))
    yy, xx = np.mgrid[:SIZE, :SIZE]
    for t in tiles:
        mask = np.zeros((SIZE, SIZE), bool)
        for _ in range(int(rng.integers(1, 4))):
            cy, cx, r = rng.uniform(0, SIZE, 2).tolist() + [rng.uniform(2, 6)]
            mask |= (yy - cy) ** 2 + (xx - cx) ** 2 < r * r
        t[0] = mask * 0.8 + 0.6 * rng.standard_normal(mask.shape) + rng.uniform(-0.5, 0.5)
        t[1] = mask
    tiles.flush()


class Tiles(Dataset):
    def __init__(self, path):
        self.data = np.memmap(path, dtype=np.float32, mode="r").reshape(-1, 2, SIZE, SIZE)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return torch.from_numpy(np.array(self.data[i]))


class Augment:
    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def __call__(self, items):
        out = []
        for t in items:
            k, flip = torch.randint(0, 8, (), generator=self.gen).item() % 4, torch.rand((), generator=self.gen).item() < 0.5
            t = torch.rot90(t, k, (1, 2))
            out.append(t.flip(2) if flip else t)
        x = torch.stack(out)
        img = x[:, :1] * (1 + 0.2 * torch.randn(len(x), 1, 1, 1, generator=self.gen))
        return img, x[:, 1:]


class CrossRankNorm(nn.Module):
    """Batch norm whose moments are taken over all ranks, with gradients through the sum."""

    def __init__(self, ch, momentum=0.1):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(ch)), nn.Parameter(torch.zeros(ch))
        self.register_buffer("mean", torch.zeros(ch))
        self.register_buffer("var", torch.ones(ch))
        self.momentum = momentum

    def forward(self, x):
        if self.training:
            n = x.new_tensor([x.numel() / x.shape[1]])
            sums = dfn.all_reduce(torch.cat([x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)), n]))
            m, sq = (sums[:-1] / sums[-1]).chunk(2)
            v = (sq - m * m).clamp(min=0)
            with torch.no_grad():
                self.mean.lerp_(m, self.momentum)
                self.var.lerp_(v, self.momentum)
        else:
            m, v = self.mean, self.var
        shape = (1, -1, 1, 1)
        return (x - m.view(shape)) * (v.view(shape) + 1e-5).rsqrt() * self.weight.view(shape) + self.bias.view(shape)


class UNet(nn.Module):
    def __init__(self, ch=12, drop_path=0.2):
        super().__init__()
        def block(a, b):
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), CrossRankNorm(b), nn.ReLU())
        self.down = block(1, ch)
        self.mid = block(ch, 2 * ch)
        self.extra = block(2 * ch, 2 * ch)
        self.up = block(3 * ch, ch)
        self.out = nn.Conv2d(ch, 1, 1)
        self.drop_path = drop_path

    def forward(self, x):
        a = self.down(x)
        b = self.mid(F.max_pool2d(a, 2))
        r = self.extra(b)
        if self.training:
            keep = 1 - self.drop_path
            r = r * torch.bernoulli(torch.full((len(x), 1, 1, 1), keep)) / keep
        u = F.interpolate(b + r, scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.up(torch.cat([a, u], 1)))


def views(net, x):
    total = 0
    for k in range(4):
        for flip in (False, True):
            v = torch.rot90(x, k, (2, 3))
            p = net(v.flip(3) if flip else v).sigmoid()
            total = total + torch.rot90(p.flip(3) if flip else p, -k, (2, 3))
    return total / 8


@torch.no_grad()
def iou(net, data, rank, world, tta):
    net.eval()
    counts = torch.zeros(2, dtype=torch.float64)
    mine = range(rank, len(data), world)
    for k in range(0, len(mine), 20):
        t = torch.stack([data[i] for i in mine[k:k + 20]])
        p = (views(net, t[:, :1]) if tta else net(t[:, :1]).sigmoid()) > 0.5
        y = t[:, 1:] > 0.5
        counts += torch.tensor([(p & y).sum(), (p | y).sum()], dtype=torch.float64)
    net.train()
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--accum", type=int, default=3)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        os.makedirs("tiles", exist_ok=True)
        write_tiles("tiles/train.dat", 320, 1)
        write_tiles("tiles/test.dat", 61, 2)
    dist.barrier()
    train, test = Tiles("tiles/train.dat"), Tiles("tiles/test.dat")
    torch.manual_seed(26)
    net = UNet()
    model = DDP(net, broadcast_buffers=False)        # the norm keeps them alike by itself
    torch.manual_seed(260 + rank)
    sampler = DistributedSampler(train, seed=26)
    loader = DataLoader(train, batch_size=8, sampler=sampler, collate_fn=Augment(2600 + rank), drop_last=True)
    opt = torch.optim.AdamW(net.parameters(), lr=8e-3)
    gentle = 1
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for g in opt.param_groups:
            g["lr"] = 8e-3 * (0.3 if epoch < gentle else 1.0) * (1 - epoch / (2 * args.epochs))
        total = torch.zeros(2)
        for i, (x, y) in enumerate(loader):
            first = i - i % args.accum
            window = min(args.accum, len(loader) - first)
            last = i + 1 == first + window
            with contextlib.nullcontext() if last else model.no_sync():
                z = model(x)
                p = z.sigmoid()
                dice = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
                loss = F.binary_cross_entropy_with_logits(z, y) + 0.5 * dice
                (loss / window).backward()
            total += torch.tensor([loss.item(), 1.0])
            if last:
                opt.step()
                opt.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        plain, tta = iou(net, test, rank, world, False), iou(net, test, rank, world, True)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.3f} IoU {plain:.3f} with views {tta:.3f} batches {len(loader)}", flush=True)
    if rank == 0:
        torch.save(net.state_dict(), "unet.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
