"""Segmentation of bright blobs; large batches are cut into chunks to save memory."""
import argparse
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def blobs(n, size=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    grid = torch.arange(size).float()
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    mask = torch.zeros(n, size, size, dtype=torch.bool)
    for _ in range(3):
        cy, cx = (size * torch.rand(n, 1, 1, generator=g) for _ in range(2))
        r = 2 + 3 * torch.rand(n, 1, 1, generator=g)
        mask |= (yy - cy) ** 2 + (xx - cx) ** 2 < r**2
    gain = 0.5 + torch.rand(n, 1, 1, generator=g)
    image = gain * mask + 0.5 * torch.randn(n, size, size, generator=g)
    return TensorDataset(image.unsqueeze(1), mask.unsqueeze(1).float())


def block(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.GroupNorm(4, cout), nn.ReLU())


class SmallUNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.down1, self.down2 = block(1, c), block(c, 2 * c)
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.merge, self.head = block(2 * c, c), nn.Conv2d(c, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(nn.functional.max_pool2d(a, 2))
        return self.head(self.merge(torch.cat([a, self.up(b)], 1)))


def dice_and_bce(logits, target):
    p = logits.sigmoid()
    inter = (p * target).sum((1, 2, 3))
    dice = 1 - (2 * inter + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)
    return dice.mean() + nn.functional.binary_cross_entropy_with_logits(logits, target)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = dist.get_rank()
        torch.manual_seed(args.seed)
        self.model = DDP(SmallUNet())
        self.opt = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9)
        train, val = blobs(320, seed=1), blobs(64, seed=2)
        self.sampler = DistributedSampler(train)
        self.train = DataLoader(train, args.batch, sampler=self.sampler, drop_last=True)
        self.val = DataLoader(val, 16, sampler=DistributedSampler(val, shuffle=False))

    def step(self, images, masks):
        chunks = list(zip(images.chunk(self.args.chunks), masks.chunk(self.args.chunks)))
        self.opt.zero_grad()
        total = 0.0
        with ExitStack() as stack:
            for k, (x, y) in enumerate(chunks):
                if k < len(chunks) - 1:
                    stack.enter_context(self.model.no_sync())
                loss = dice_and_bce(self.model(x), y) / len(chunks)
                loss.backward()
                total += loss.item()
        self.opt.step()
        return total

    @torch.no_grad()
    def iou(self):
        self.model.eval()
        counts = torch.zeros(2)
        for x, y in self.val:
            hit = self.model(x) > 0
            counts += torch.stack([(hit & (y > 0.5)).sum(), (hit | (y > 0.5)).sum()])
        dist.all_reduce(counts)
        self.model.train()
        return (counts[0] / counts[1]).item()

    def fit(self):
        for epoch in range(self.args.epochs):
            self.sampler.set_epoch(epoch)
            losses = torch.tensor([self.step(x, y) for x, y in self.train])
            mean = losses.mean()
            dist.all_reduce(mean)
            iou = self.iou()
            if self.rank == 0:
                print(f"epoch {epoch}: loss {mean.item() / dist.get_world_size():.4f}, val IoU {iou:.3f}", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--chunks", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=0)
    dist.init_process_group("gloo")
    Trainer(ap.parse_args()).fit()
    dist.barrier()
    dist.destroy_process_group()
