"""Lesion segmentation in hospitals with unequal archives: batch sizes follow the archives, DDP losses are re-weighted."""
import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.nn  # before init: imported later, its default arguments keep the group alive until exit
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

ARCHIVE = {0: 480, 1: 160}  # scans at each hospital
SIDE = 16


class Scans(Dataset):
    def __init__(self, n, seed):
        gen = torch.Generator().manual_seed(seed)
        grid = torch.arange(SIDE).float()
        cx, cy = (3 + 10 * torch.rand(2, n, 1, 1, generator=gen)).unbind(0)
        radius = 2 + 2 * torch.rand(n, 1, 1, generator=gen)
        self.mask = ((grid.view(1, 1, -1) - cx) ** 2 + (grid.view(1, -1, 1) - cy) ** 2 < radius ** 2).float()
        noise = torch.randn(n, SIDE, SIDE, generator=gen)
        self.image = (self.mask + 0.5 * noise).unsqueeze(1)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.mask[i]


class SmallUNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.GroupNorm(3, c), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(c, 2 * c, 3, padding=1), nn.GroupNorm(3, 2 * c), nn.ReLU())
        self.up = nn.Conv2d(3 * c, 1, 3, padding=1)

    def forward(self, x):
        skip = self.down(x)
        deep = F.interpolate(self.mid(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.up(torch.cat([skip, deep], 1)).squeeze(1)


@torch.no_grad()
def dice(model, loader):
    """Overlap over all hospitals: sums are reduced, not ratios."""
    model.eval()
    sums = torch.zeros(2)
    for image, mask in loader:
        guess = (model(image) > 0).float()
        sums += torch.stack([2 * (guess * mask).sum(), guess.sum() + mask.sum()])
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1].clamp(min=1)).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == len(ARCHIVE)

    everyone = sum(ARCHIVE.values())
    batch = args.global_batch * ARCHIVE[rank] // everyone  # 24 and 8: the same number of steps
    weight = batch * world / args.global_batch  # DDP divides by world, the sample mean wants batch / global batch
    train = DataLoader(Scans(ARCHIVE[rank], seed=1 + rank), batch_size=batch, shuffle=True, drop_last=True,
                       generator=torch.Generator().manual_seed(rank))
    test = DataLoader(Scans(ARCHIVE[rank] // 4, seed=91 + rank), batch_size=40)
    steps = torch.tensor([len(train), -len(train)])
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    if steps[0] != -steps[1]:
        raise ValueError("batch sizes must give every hospital the same number of steps")

    torch.manual_seed(0)
    model = DDP(SmallUNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    total = args.epochs * len(train)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / total)))
    for epoch in range(args.epochs):
        seen = torch.zeros(2)
        for image, mask in train:
            loss = F.binary_cross_entropy_with_logits(model(image), mask)
            optimizer.zero_grad()
            (weight * loss).backward()
            optimizer.step()
            schedule.step()
            seen += torch.tensor([loss.item() * len(image), len(image)])
        dist.all_reduce(seen)
        score = dice(model.module, test)
        if rank == 0:
            print(f"epoch {epoch}: loss {seen[0].item() / seen[1].item():.4f} dice {score:.3f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "unet.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
