"""Detector-like toy: a fixed set of queries predicts the blobs in a scene."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Scenes(Dataset):
    """One to four blobs on a line of 40 cells."""

    def __init__(self, n=320, cells=40, slots=4):
        g = torch.Generator().manual_seed(90)
        count = torch.randint(1, slots + 1, (n,), generator=g)
        pos = torch.rand(n, slots, generator=g).sort(dim=1).values
        self.valid = torch.arange(slots) < count.unsqueeze(1)
        grid = torch.linspace(0, 1, cells)
        bump = torch.exp(-((grid - pos.unsqueeze(2)) ** 2) / 0.002) * self.valid.unsqueeze(2)
        self.image = bump.sum(1) + 0.05 * torch.randn(n, cells, generator=g)
        self.pos = pos

    def __len__(self):
        return len(self.image)

    def __getitem__(self, i):
        return self.image[i], self.pos[i], self.valid[i]


class Detector(nn.Module):
    def __init__(self, cells=40, slots=4, dim=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(cells, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.where = nn.Linear(dim, slots)
        self.there = nn.Linear(dim, slots)

    def forward(self, image):
        h = self.body(image)
        return self.where(h).sigmoid(), self.there(h)


class SetCriterion(nn.Module):
    """Sums over all boxes, normalised by the average number of boxes per process."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def forward(self, where, there, pos, valid):
        num_boxes = valid.sum().float()
        dist.all_reduce(num_boxes)
        num_boxes = num_boxes.clamp(min=1)
        box = ((where - pos).abs() * valid).sum() / num_boxes
        score = F.binary_cross_entropy_with_logits(there, valid.float(), reduction="sum") / num_boxes
        return 5 * box + score


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.02)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(3)
    model = DDP(Detector())
    criterion = SetCriterion(world)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    data = Scenes()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        err = torch.zeros(2)
        for image, pos, valid in loader:
            where, there = model(image)
            loss = criterion(where, there, pos, valid)
            opt.zero_grad()
            loss.backward()
            opt.step()
            err += torch.stack([((where - pos).abs() * valid).sum().detach(), valid.sum().float()])
        dist.all_reduce(err)
        if rank == 0:
            print(f"epoch {epoch}: mean position error {(err[0] / err[1]).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
